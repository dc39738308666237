//! What a backend says about the model it runs.
//!
//! It owns the description only; how a model is found, loaded and laid out is the backend's business.

/// How a backend puts prompts into the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// One row of all tokens; no prompt sees another.
    Packed,
    /// A row for each prompt, padded to one length.
    Padded,
    /// One prompt at a time.
    Single,
}

slugs!(Layout, "layout", Packed = "packed", Padded = "padded", Single = "single",);

/// An attention module that a backend attached its own attention to.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionModule {
    /// Name of the module within the model.
    pub name: String,
    /// Index of the layer it belongs to.
    pub layer: usize,
    /// Factor of its scores before the softmax.
    pub scale: f64,
}

/// The model that a backend runs.
///
/// # Examples
///
/// ```
/// use prefill_router::{Layout, ModelInfo};
///
/// let mut model = ModelInfo::new("org/model", 30, 576);
/// model.context_window = Some(8192);
/// model.layout = "packed".parse()?;
/// assert_eq!((model.n_layers, model.hidden_dim), (30, 576));
/// assert_eq!(model.layout, Layout::Packed);
///
/// assert!("ragged".parse::<Layout>().unwrap_err().is_invalid_request());
/// # Ok::<(), prefill_router::PrefillError>(())
/// ```
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq)]
pub struct ModelInfo {
    /// Name or path it was asked for by.
    pub id: String,
    /// Revision it resolved to, where it has one.
    pub revision: Option<String>,
    /// Number of blocks: direct indexes are 0..n.
    pub n_layers: usize,
    /// Width of a hidden state.
    pub hidden_dim: usize,
    /// Type of its weights, such as `float32`.
    pub dtype: String,
    /// Device of its embeddings, such as `cpu` or `cuda:0`.
    pub device: String,
    /// Most tokens of a prompt, where a limit is known.
    pub context_window: Option<usize>,
    /// How prompts are put into it.
    pub layout: Layout,
    /// Why that layout and no faster one.
    pub layout_reason: String,
    /// Attention modules attached, in the order of their layers; possibly none.
    pub attention: Vec<AttentionModule>,
}

impl ModelInfo {
    /// A model of that name and shape: float32 on the cpu, prompts one at a time, no known limit.
    pub fn new(id: impl Into<String>, n_layers: usize, hidden_dim: usize) -> Self {
        Self {
            id: id.into(),
            revision: None,
            n_layers,
            hidden_dim,
            dtype: "float32".to_owned(),
            device: "cpu".to_owned(),
            context_window: None,
            layout: Layout::Single,
            layout_reason: String::new(),
            attention: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_claims_nothing_that_nobody_said() {
        let model = ModelInfo::new("m", 2, 8);
        assert_eq!((model.id.as_str(), model.n_layers, model.hidden_dim), ("m", 2, 8));
        assert_eq!((model.dtype.as_str(), model.device.as_str()), ("float32", "cpu"));
        assert_eq!((model.revision, model.context_window), (None, None));
        assert_eq!((model.layout, model.layout_reason.as_str()), (Layout::Single, ""));
        assert!(model.attention.is_empty());
    }
}
