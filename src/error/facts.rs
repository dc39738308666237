//! The facts of an error in a form another language can take over.
//!
//! It owns the names of the facts, which are the names of the variants' fields, and knows nothing of
//! the language that reads them.

use crate::contract::{Layer, Pooling};
use crate::error::PrefillError;

/// One fact that an error carries, in a form another language can take over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fact {
    /// An index or a number of things.
    Count(usize),
    /// Words, a name, a path.
    Text(String),
    /// Several names.
    Names(Vec<String>),
    /// The kind has this fact, this error does not know it.
    Absent,
}

/// How the field of an error is told as a fact.
trait ToFact {
    fn to_fact(&self) -> Fact;
}

impl ToFact for usize {
    fn to_fact(&self) -> Fact {
        Fact::Count(*self)
    }
}

impl ToFact for String {
    fn to_fact(&self) -> Fact {
        Fact::Text(self.clone())
    }
}

impl ToFact for Vec<String> {
    fn to_fact(&self) -> Fact {
        Fact::Names(self.clone())
    }
}

impl ToFact for Layer {
    fn to_fact(&self) -> Fact {
        Fact::Text(self.to_string())
    }
}

impl ToFact for Pooling {
    fn to_fact(&self) -> Fact {
        Fact::Text(self.to_string())
    }
}

impl<T: ToFact> ToFact for Option<T> {
    fn to_fact(&self) -> Fact {
        self.as_ref().map_or(Fact::Absent, T::to_fact)
    }
}

/// `facts!(field, prompt)` = each of these bindings under its own name.
macro_rules! facts {
    ($($name:ident),*) => { vec![$((stringify!($name), $name.to_fact())),*] };
}

impl PrefillError {
    /// The facts of the error under their field names, the same names for every error of a kind.
    ///
    /// # Examples
    ///
    /// ```
    /// use prefill_router::{Fact, ForwardRequest};
    ///
    /// let error = ForwardRequest::builder(["hello"]).max_length(0).build().unwrap_err();
    /// let facts = error.facts();
    /// assert_eq!(facts[0], ("field", Fact::Text("max_length".to_owned())));
    /// assert_eq!(facts[3], ("prompt", Fact::Absent));
    /// ```
    #[rustfmt::skip] // a table: one kind a line
    pub fn facts(&self) -> Vec<(&'static str, Fact)> {
        match self {
            Self::InvalidRequest { field, value, expected, prompt } => facts!(field, value, expected, prompt),
            Self::ContextWindowExceeded { prompt, tokens, limit } => facts!(prompt, tokens, limit),
            Self::ChatTemplate { prompt, model, detail } => facts!(prompt, model, detail),
            Self::ModelLoad { model, detail, names } => facts!(model, detail, names),
            Self::RemoteCode { model, detail } => facts!(model, detail),
            Self::UnsupportedModel { model, expected, found } => facts!(model, expected, found),
            Self::Device { device, available } => facts!(device, available),
            Self::OutOfMemory { device, tokens } => facts!(device, tokens),
            Self::NonFinite { prompt, layer, pooling } => facts!(prompt, layer, pooling),
            Self::InvalidResult { expected, found } => facts!(expected, found),
            Self::Environment { interpreter, prefix, missing, fix } => facts!(interpreter, prefix, missing, fix),
            Self::Overloaded { queued, limit } | Self::Deadline { queued, limit } => facts!(queued, limit),
            Self::Closed => facts!(),
            Self::Python { type_name, message, traceback } => facts!(type_name, message, traceback),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::tests::samples;

    #[test]
    fn every_kind_names_its_facts() {
        let names: Vec<Vec<&str>> = samples()
            .iter()
            .map(|error| error.facts().into_iter().map(|(name, _)| name).collect())
            .collect();
        let expected: [&[&str]; 15] = [
            &["field", "value", "expected", "prompt"],
            &["prompt", "tokens", "limit"],
            &["prompt", "model", "detail"],
            &["model", "detail", "names"],
            &["model", "detail"],
            &["model", "expected", "found"],
            &["device", "available"],
            &["device", "tokens"],
            &["prompt", "layer", "pooling"],
            &["expected", "found"],
            &["interpreter", "prefix", "missing", "fix"],
            &["queued", "limit"],
            &["queued", "limit"],
            &[],
            &["type_name", "message", "traceback"],
        ];
        assert_eq!(names, expected);
    }

    #[test]
    fn facts_keep_their_values_whole() {
        let long = "x".repeat(500);
        let error = PrefillError::invalid_request("layers", &long, "all");
        assert_eq!(error.facts()[1], ("value", Fact::Text(long)));
        assert_eq!(error.facts()[3], ("prompt", Fact::Absent));
    }

    #[test]
    fn each_form_of_fact_appears() {
        let names = vec!["a".to_owned()];
        let load = PrefillError::ModelLoad {
            model: "m".to_owned(),
            detail: "d".to_owned(),
            names: names.clone(),
        };
        assert_eq!(load.facts()[2], ("names", Fact::Names(names)));

        let error =
            PrefillError::NonFinite { prompt: 3, layer: Layer::Final, pooling: Pooling::Mean };
        let text = |text: &str| Fact::Text(text.to_owned());
        let facts =
            [("prompt", Fact::Count(3)), ("layer", text("final")), ("pooling", text("mean"))];
        assert_eq!(error.facts(), facts);
    }
}
