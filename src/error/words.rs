//! The words of an error: one line, for people, that ends with what to do.
//!
//! It owns wording and shortening only. The facts stay whole in the error; a program reads those, and
//! nothing may depend on the text.

use std::fmt::{self, Display, Formatter, Write as _};

use crate::error::PrefillError;

/// Values longer than this many characters are shown by their two ends.
const SHOWN: usize = 80;
/// How many of those characters come from the end, where paths and names differ.
const SHOWN_END: usize = 24;
/// Names listed before the rest is only counted.
const NAMES: usize = 5;

impl std::error::Error for PrefillError {}

impl Display for PrefillError {
    #[rustfmt::skip] // a table: the words of one kind in two lines
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidRequest { field, value, expected, prompt: None } =>
                write!(f, "invalid {field} {}: expected {}", Value(value), Clause(expected)),
            Self::InvalidRequest { field, value, expected, prompt: Some(prompt) } =>
                write!(f, "invalid {field} {} at prompt {prompt}: expected {}", Value(value), Clause(expected)),
            Self::ContextWindowExceeded { prompt, tokens, limit: Some(limit) } =>
                write!(f, "prompt {prompt} has {}, over the limit of {limit}; shorten it or set overflow to keep_template or right", Counted(*tokens, "token")),
            Self::ContextWindowExceeded { prompt, tokens, limit: None } =>
                write!(f, "prompt {prompt} has {}, more than the model takes; shorten it or set max_length, and overflow to keep_template or right", Counted(*tokens, "token")),
            Self::ChatTemplate { prompt: Some(prompt), model, detail } =>
                write!(f, "the chat template of {} refused prompt {prompt}: {}; change its messages or pass raw text", Value(model), Clause(detail)),
            Self::ChatTemplate { prompt: None, model, detail } =>
                write!(f, "{} has no usable chat template: {}; pass raw text or tokens", Value(model), Clause(detail)),
            Self::ModelLoad { model, detail, names } =>
                write!(f, "cannot load {}: {}{}; check its name, revision and files", Value(model), Clause(detail), Listed(names)),
            Self::RemoteCode { model, detail } =>
                write!(f, "{} needs code of its own: {}; it runs with trust_remote_code only, from a folder or a pinned commit", Value(model), Clause(detail)),
            Self::UnsupportedModel { model, expected, found } =>
                write!(f, "{} is not supported: expected {}, found {}; choose another model", Value(model), Clause(expected), Clause(found)),
            Self::Device { device, available } =>
                write!(f, "device {} is not there; choose from {}", Value(device), Clause(available)),
            Self::OutOfMemory { device, tokens: Some(tokens) } =>
                write!(f, "out of memory on {} with {} in the batch; lower max_tokens or batch_size", Value(device), Counted(*tokens, "token")),
            Self::OutOfMemory { device, tokens: None } =>
                write!(f, "out of memory on {}; free some there or choose a smaller dtype or model", Value(device)),
            Self::NonFinite { prompt, layer, pooling } =>
                write!(f, "prompt {prompt} has a NaN or an infinity in layer `{layer}`, pooling `{pooling}`; try a dtype of wider range, such as float32"),
            Self::InvalidResult { expected, found } =>
                write!(f, "invalid result: expected {}, found {}; check the backend and the model it runs", Clause(expected), Clause(found)),
            Self::Environment { interpreter, prefix, missing, fix } => {
                write!(f, "the Python environment lacks {}", Clause(missing))?;
                match (interpreter, prefix) {
                    (Some(interpreter), Some(prefix)) => write!(f, " (interpreter `{interpreter}`, prefix `{prefix}`)")?,
                    (Some(interpreter), None) => write!(f, " (interpreter `{interpreter}`)")?,
                    (None, Some(prefix)) => write!(f, " (prefix `{prefix}`)")?,
                    (None, None) => {}
                }
                write!(f, "; {}", Clause(fix))
            }
            Self::Overloaded { queued, limit } =>
                write!(f, "the queue is full, {queued} of {} waiting; try again later or raise its limit", Counted(*limit, "request")),
            Self::Deadline { queued, limit } =>
                write!(f, "the deadline passed before the forward began, {queued} of {} waiting; allow more time or send fewer", Counted(*limit, "request")),
            Self::Closed =>
                f.write_str("the forward is closed and takes no requests; open another"),
            Self::Python { type_name, message, .. } if message.is_empty() =>
                write!(f, "python raised {}; see its traceback", Value(type_name)),
            Self::Python { type_name, message, .. } =>
                write!(f, "python raised {}: {}; see its traceback", Value(type_name), Clause(message)),
        }
    }
}

/// A value in backticks, on one line, by its two ends where it is long.
struct Value<'a>(&'a str);

impl Display for Value<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_char('`')?;
        match ends(self.0) {
            Some((start, end)) => {
                one_line(start, f)?;
                f.write_char('…')?;
                one_line(end, f)?;
            }
            None => one_line(self.0, f)?,
        }
        f.write_char('`')
    }
}

/// Both ends of a text of more than `SHOWN` characters. Reads no more of it than it shows.
fn ends(text: &str) -> Option<(&str, &str)> {
    text.char_indices().nth(SHOWN)?;
    let (start, _) = text.char_indices().nth(SHOWN - SHOWN_END - 1)?;
    let (end, _) = text.char_indices().nth_back(SHOWN_END - 1)?;
    Some((&text[..start], &text[end..]))
}

/// Line breaks and other control characters as escapes: a message is one line of a log.
fn one_line(text: &str, f: &mut Formatter<'_>) -> fmt::Result {
    text.chars().try_for_each(|c| match c {
        c if c.is_control() => write!(f, "{}", c.escape_default()),
        c => f.write_char(c),
    })
}

/// Somebody else's words inside a sentence of ours: whole, on one line, without their full stop.
struct Clause<'a>(&'a str);

impl Display for Clause<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let text = match self.0.trim_end() {
            text if text.ends_with("..") => text,
            text => text.strip_suffix('.').unwrap_or(text),
        };
        for (at, word) in text.split_whitespace().enumerate() {
            if at > 0 {
                f.write_char(' ')?;
            }
            one_line(word, f)?;
        }
        Ok(())
    }
}

/// A number with its noun.
struct Counted(usize, &'static str);

impl Display for Counted {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self(count, noun) = self;
        write!(f, "{count} {noun}{}", if *count == 1 { "" } else { "s" })
    }
}

/// The first names in parentheses, the others counted; nothing for no names.
struct Listed<'a>(&'a [String]);

impl Display for Listed<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for (at, name) in self.0.iter().take(NAMES).enumerate() {
            write!(f, "{}{}", if at == 0 { " (" } else { ", " }, Value(name))?;
        }
        match self.0.len() {
            0 => Ok(()),
            few if few <= NAMES => f.write_char(')'),
            many => write!(f, " and {} more)", many - NAMES),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::tests::samples;

    #[test]
    fn each_kind_says_what_is_wrong_and_what_to_do() {
        let words: Vec<_> = samples().iter().map(ToString::to_string).collect();
        let expected = [
            "invalid layers `4`: expected an index in 0..3 inclusive (or -4..-1), or final",
            "prompt 2 has 53 tokens, over the limit of 16; shorten it or set overflow to keep_template or right",
            "the chat template of `org/m` refused prompt 1: roles must alternate; change its messages or pass raw text",
            "cannot load `org/m`: tensors are missing (`a`, `b`); check its name, revision and files",
            "`org/m` needs code of its own: it ships modeling_m.py; it runs with trust_remote_code only, from a folder or a pinned commit",
            "`org/m` is not supported: expected states of [batch, tokens, hidden], found [1, 4, 7, 32]; choose another model",
            "device `cuda:1` is not there; choose from cpu, cuda:0",
            "out of memory on `cuda:0` with 4096 tokens in the batch; lower max_tokens or batch_size",
            "prompt 3 has a NaN or an infinity in layer `2`, pooling `last`; try a dtype of wider range, such as float32",
            "invalid result: expected 2 receipts, found 1; check the backend and the model it runs",
            "the Python environment lacks transformers (interpreter `/env/bin/python`, prefix `/env`); run /env/bin/python -m pip install transformers",
            "the queue is full, 8 of 8 requests waiting; try again later or raise its limit",
            "the deadline passed before the forward began, 1 of 8 requests waiting; allow more time or send fewer",
            "the forward is closed and takes no requests; open another",
            "python raised `KeyError`: 'a'; see its traceback",
        ];
        assert_eq!(words, expected);
    }

    #[test]
    fn facts_that_are_not_known_leave_no_hole() {
        let text = str::to_owned;
        let exceeded = PrefillError::ContextWindowExceeded { prompt: 0, tokens: 1, limit: None };
        let template = PrefillError::ChatTemplate {
            prompt: None,
            model: text("m"),
            detail: text("it has none"),
        };
        let memory = PrefillError::OutOfMemory { device: text("cpu"), tokens: None };
        let environment = PrefillError::Environment {
            interpreter: None,
            prefix: None,
            missing: text("an interpreter"),
            fix: text("set PREFILL_ROUTER_PYTHON"),
        };
        let python = PrefillError::Python {
            type_name: text("E"),
            message: String::new(),
            traceback: String::new(),
        };
        for (error, words) in [
            (exceeded, "prompt 0 has 1 token, more than the model takes; "),
            (template, "`m` has no usable chat template: it has none; pass raw text or tokens"),
            (memory, "out of memory on `cpu`; free"),
            (environment, "the Python environment lacks an interpreter; set PREFILL_ROUTER_PYTHON"),
            (python, "python raised `E`; see its traceback"),
        ] {
            assert!(error.to_string().starts_with(words), "{error}");
        }
    }

    #[test]
    fn a_long_value_is_shown_by_its_ends_and_never_split_inside_a_character() {
        let at_most = "é".repeat(80);
        assert_eq!(Value(&at_most).to_string(), format!("`{at_most}`"));
        let longer = format!("{}{}", "é".repeat(500), "ü".repeat(500));
        let shown = format!("`{}…{}`", "é".repeat(55), "ü".repeat(24));
        assert_eq!(Value(&longer).to_string(), shown);
    }

    #[test]
    fn a_message_is_one_line() {
        let error = PrefillError::invalid_request("pooling", "a\nb\u{1b}[2J\0", "last, mean");
        assert_eq!(error.to_string(), r"invalid pooling `a\nb\u{1b}[2J\u{0}`: expected last, mean");
        let error = PrefillError::ModelLoad {
            model: "m".to_owned(),
            detail: "one.\n  two...\n".to_owned(),
            names: Vec::new(),
        };
        assert_eq!(
            error.to_string(),
            "cannot load `m`: one. two...; check its name, revision and files"
        );
    }

    #[test]
    fn names_beyond_the_fifth_are_counted() {
        let names: Vec<_> = (0..8).map(|i| format!("w{i}")).collect();
        assert_eq!(Listed(&names[..0]).to_string(), "");
        assert_eq!(Listed(&names[..5]).to_string(), " (`w0`, `w1`, `w2`, `w3`, `w4`)");
        assert_eq!(Listed(&names).to_string(), " (`w0`, `w1`, `w2`, `w3`, `w4` and 3 more)");
    }
}
