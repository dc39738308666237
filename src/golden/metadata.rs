//! Request, receipts and model of a golden set as JSON, and back.
//!
//! It owns the schema and its version. It knows neither files nor vectors; what it reads is checked as
//! every request and receipt is, by their own constructors.

use std::str::FromStr;

use serde_json::{Value, json};

use super::Golden;
use crate::contract::{
    Batching, ForwardRequest, Layer, Message, ModelInfo, Overflow, Pooling, Profile, Prompt,
    Receipt,
};
use crate::error::PrefillError;

/// Version of the schema. A file of a later one is refused.
const VERSION: usize = 1;

/// What a file says apart from the vectors.
#[derive(Debug)]
pub(super) struct Parts {
    pub request: ForwardRequest,
    pub layers: Vec<Layer>,
    pub receipts: Vec<Receipt>,
    pub model: ModelInfo,
}

pub(super) fn to_json(golden: &Golden) -> Value {
    let (request, output) = (&golden.request, &golden.output);
    json!({
        "version": VERSION,
        "request": {
            "prompts": request.prompts().iter().map(prompt_to_json).collect::<Vec<_>>(),
            "chat_template_kwargs": request.chat_template_kwargs(),
            "layers": output.layers().iter().map(layer_to_json).collect::<Vec<_>>(),
            "pooling": request.pooling().iter().map(|pooling| pooling.slug()).collect::<Vec<_>>(),
            "batching": match request.batching() {
                Batching::Packed { max_tokens } => json!({"max_tokens": max_tokens}),
                Batching::Padded { batch_size } => json!({"batch_size": batch_size}),
            },
            "max_length": request.max_length(),
            "overflow": request.overflow().slug(),
            "add_special_tokens": request.add_special_tokens(),
            "profile": request.profile().slug(),
        },
        "receipts": output.receipts().iter().map(receipt_to_json).collect::<Vec<_>>(),
        "model": model_to_json(output.model()),
    })
}

/// What the JSON says, or what is wrong with it.
pub(super) fn from_json(value: &Value) -> Result<Parts, String> {
    let version = count(value, "version")?;
    if version > VERSION {
        return Err(format!(
            "it is of version {version}, later than {VERSION}; use a later prefill-router"
        ));
    }
    let request = field(value, "request")?;
    let layers = list(request, "layers", layer_from_json)?;
    Ok(Parts {
        request: request_from_json(request, &layers)?,
        layers,
        receipts: list(value, "receipts", receipt_from_json)?,
        model: model_from_json(field(value, "model")?)?,
    })
}

fn request_from_json(value: &Value, layers: &[Layer]) -> Result<ForwardRequest, String> {
    let prompts: Vec<Prompt> = list(value, "prompts", prompt_from_json)?;
    let builder = match slug(text(value, "profile")?)? {
        Profile::Default => ForwardRequest::builder(prompts),
        Profile::Reference => ForwardRequest::reference_builder(prompts),
    };
    let kwargs = field(value, "chat_template_kwargs")?.as_object();
    let batching = field(value, "batching")?;
    let batching = match optional(batching, "max_tokens", count)? {
        Some(max_tokens) => Batching::Packed { max_tokens },
        None => Batching::Padded { batch_size: count(batching, "batch_size")? },
    };
    let pooling = |pooling: &Value| slug::<Pooling>(pooling.as_str().unwrap_or_default());
    let builder = builder
        .chat_template_kwargs(kwargs.ok_or_else(|| wrong("chat_template_kwargs"))?.clone())
        .layers(layers.to_vec())
        .pooling(list(value, "pooling", pooling)?)
        .batching(batching)
        .max_length(optional(value, "max_length", count)?)
        .overflow(slug::<Overflow>(text(value, "overflow")?)?)
        .add_special_tokens(optional(value, "add_special_tokens", flag)?);
    builder.build().map_err(|error| error.to_string())
}

fn prompt_to_json(prompt: &Prompt) -> Value {
    let message = |message: &Message| json!({"role": message.role, "content": message.content});
    match prompt {
        Prompt::User(text) => json!({"user": text}),
        Prompt::Chat(messages) => json!({"chat": messages.iter().map(message).collect::<Vec<_>>()}),
        Prompt::Raw(text) => json!({"raw": text}),
        Prompt::Tokens(ids) => json!({"tokens": ids}),
    }
}

fn prompt_from_json(value: &Value) -> Result<Prompt, String> {
    let kind = value.as_object().and_then(|object| object.keys().next()).map(String::as_str);
    match kind {
        Some("user") => Ok(Prompt::User(text(value, "user")?.to_owned())),
        Some("raw") => Ok(Prompt::Raw(text(value, "raw")?.to_owned())),
        Some("chat") => list(value, "chat", |message| {
            Ok(Message::new(text(message, "role")?, text(message, "content")?))
        })
        .map(Prompt::Chat),
        Some("tokens") => list(value, "tokens", |id| {
            id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| wrong("tokens"))
        })
        .map(Prompt::Tokens),
        _ => Err(wrong("prompts")),
    }
}

fn layer_to_json(layer: &Layer) -> Value {
    match layer {
        Layer::Direct(index) => json!(index),
        other => json!(other.to_string()),
    }
}

fn layer_from_json(value: &Value) -> Result<Layer, String> {
    match value.as_str() {
        Some("final") => Ok(Layer::Final),
        Some(_) => Err(wrong("layers")),
        None => number(value).map(Layer::Direct).ok_or_else(|| wrong("layers")),
    }
}

fn receipt_to_json(receipt: &Receipt) -> Value {
    let cut = receipt.cut_range().map(|range| [range.start, range.end]);
    json!({"tokens": receipt.tokens(), "used": receipt.used(), "cut": cut})
}

fn receipt_from_json(value: &Value) -> Result<Receipt, String> {
    let tokens = count(value, "tokens")?;
    let cut =
        optional(value, "cut", |value, name| list(value, name, |n| number(n).ok_or(wrong(name))))?;
    match cut.as_deref() {
        None => Ok(Receipt::new(tokens)),
        Some(&[from, to]) => Receipt::cut(tokens, from..to).map_err(|error| error.to_string()),
        Some(_) => Err(wrong("cut")),
    }
}

fn model_to_json(model: &ModelInfo) -> Value {
    json!({
        "id": model.id,
        "revision": model.revision,
        "n_layers": model.n_layers,
        "hidden_dim": model.hidden_dim,
        "dtype": model.dtype,
        "device": model.device,
        "context_window": model.context_window,
        "layout": model.layout.slug(),
    })
}

fn model_from_json(value: &Value) -> Result<ModelInfo, String> {
    let (n_layers, hidden_dim) = (count(value, "n_layers")?, count(value, "hidden_dim")?);
    let mut model = ModelInfo::new(text(value, "id")?, n_layers, hidden_dim);
    model.revision = optional(value, "revision", text)?.map(str::to_owned);
    text(value, "dtype")?.clone_into(&mut model.dtype);
    text(value, "device")?.clone_into(&mut model.device);
    model.context_window = optional(value, "context_window", count)?;
    model.layout = slug(text(value, "layout")?)?;
    Ok(model)
}

fn wrong(name: &str) -> String {
    format!("its metadata has no sound `{name}`")
}

fn field<'a>(value: &'a Value, name: &str) -> Result<&'a Value, String> {
    value.get(name).ok_or_else(|| wrong(name))
}

fn text<'a>(value: &'a Value, name: &str) -> Result<&'a str, String> {
    field(value, name)?.as_str().ok_or_else(|| wrong(name))
}

fn flag(value: &Value, name: &str) -> Result<bool, String> {
    field(value, name)?.as_bool().ok_or_else(|| wrong(name))
}

fn count(value: &Value, name: &str) -> Result<usize, String> {
    number(field(value, name)?).ok_or_else(|| wrong(name))
}

fn number(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|number| usize::try_from(number).ok())
}

fn list<T>(
    value: &Value,
    name: &str,
    item: impl Fn(&Value) -> Result<T, String>,
) -> Result<Vec<T>, String> {
    field(value, name)?.as_array().ok_or_else(|| wrong(name))?.iter().map(item).collect()
}

/// A field that is null, or absent, where there is none.
fn optional<'a, T>(
    value: &'a Value,
    name: &str,
    read: impl Fn(&'a Value, &str) -> Result<T, String>,
) -> Result<Option<T>, String> {
    match value.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(_) => read(value, name).map(Some),
    }
}

fn slug<T: FromStr<Err = PrefillError>>(word: &str) -> Result<T, String> {
    word.parse().map_err(|error: PrefillError| error.to_string())
}
