//! Vectors of one prompt from Rust: `cargo run --example embed -- MODEL "a prompt"`.
//!
//! Shows the two things a router does with the crate: read a row, and map the errors it can act on.

use std::process::ExitCode;

use prefill_router::{ForwardRequest, Pooling, PrefillError, PrefillForward, TransformersForward};

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let (Some(model), Some(prompt)) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: embed MODEL PROMPT");
        return ExitCode::from(2);
    };
    match embed(&model, &prompt) {
        Ok(()) => ExitCode::SUCCESS,
        Err(PrefillError::ContextWindowExceeded { tokens, limit, .. }) => {
            eprintln!(
                "send this one to a model with a larger window: {tokens} tokens, limit {limit:?}"
            );
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error[{}]: {error}", error.kind());
            ExitCode::FAILURE
        }
    }
}

fn embed(model: &str, prompt: &str) -> Result<(), PrefillError> {
    let mut forward = TransformersForward::new(model)?;
    let request = ForwardRequest::builder([prompt]).pooling([Pooling::Last]).build()?;
    let output = forward.forward(&request)?;
    for &layer in output.layers() {
        let row = output.row(Pooling::Last, layer, 0).unwrap_or_default();
        let norm = row.iter().map(|value| value * value).sum::<f32>().sqrt();
        println!("layer {layer:>5}: {} values, norm {norm:.2}", row.len());
    }
    println!("{} tokens", output.receipts()[0].used());
    Ok(())
}
