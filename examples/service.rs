//! Vectors over HTTP: `cargo run --example service -- MODEL [--addr 127.0.0.1:8080] [--queue 256] [--deadline 10]`.
//!
//!     POST /v1/features {"prompts": ["What is a monad?"], "layers": [20, "final"], "pooling": ["last"]}
//!     GET /health, GET /model
//!
//! Shows many callers of one backend: each HTTP request is one request of the queue, what comes together runs together,
//! and a client that hangs up takes its request back. Ctrl-C refuses what waits, gives what runs half a second, and ends.
//! The log, Python's included, goes to standard error; `RUST_LOG=prefill_router=debug` adds the phases of each request.

use std::process::{ExitCode, exit};
use std::sync::Arc;
use std::time::Duration;
use std::{env, thread};

use axum::extract::rejection::JsonRejection;
use axum::extract::{Json, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{Router, get, post};
use prefill_router::batching::{BatchedConfig, BatchedForward, Close, Handle, QueueStatus};
use prefill_router::{
    ErrorKind, ForwardOutput, ForwardRequest, Layer, ModelInfo, Pooling, PrefillError,
    TransformersForward,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tracing_subscriber::filter::{EnvFilter, LevelFilter};
use tracing_subscriber::fmt::format::FmtSpan;

/// How long a forward that runs may hold up the end.
const GRACE: Duration = Duration::from_millis(500);

#[tokio::main]
async fn main() -> ExitCode {
    let Some(model) = env::args().nth(1).filter(|argument| !argument.starts_with('-')) else {
        eprintln!(
            "usage: service MODEL [--addr HOST:PORT] [--queue REQUESTS] [--deadline SECONDS]"
        );
        return ExitCode::from(2);
    };
    tracing_subscriber::fmt()
        .with_env_filter(log_filter())
        .with_writer(std::io::stderr)
        // A line when a span ends: without it, spans are only told around events.
        .with_span_events(FmtSpan::CLOSE)
        .init();
    match serve(&model).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn serve(model: &str) -> Result<(), Box<dyn std::error::Error>> {
    let config = BatchedConfig::new()
        .queue_limit(flag("--queue", "256").parse()?)
        .deadline(Duration::try_from_secs_f64(flag("--deadline", "10").parse()?)?);
    let handle = BatchedForward::spawn(TransformersForward::new(model)?, config)?;
    let listener = tokio::net::TcpListener::bind(flag("--addr", "127.0.0.1:8080")).await?;
    println!("listening on {}", listener.local_addr()?);
    tokio::spawn(warm_up(handle.with_deadline(None)));
    let routes = Router::new()
        .route("/v1/features", post(features))
        .route("/health", get(health))
        .route("/model", get(describe))
        .with_state(handle.clone());
    axum::serve(listener, routes).with_graceful_shutdown(interrupt(handle.clone())).await?;
    // To leave `main` while a forward runs would take the libraries away from under it.
    handle.close(Close::Refuse);
    Ok(())
}

/// What `RUST_LOG` asks for.
fn log_filter() -> EnvFilter {
    EnvFilter::builder().with_default_directive(LevelFilter::INFO.into()).from_env_lossy()
}

/// The word behind a flag.
fn flag(name: &str, default: &str) -> String {
    env::args().skip_while(|word| word != name).nth(1).unwrap_or_else(|| default.to_owned())
}

/// Loads the model. A service that cannot has nothing to offer.
async fn warm_up(handle: Handle) {
    match handle.model().await {
        Ok(model) => println!("ready: {} layers of {}", model.n_layers, model.id),
        Err(error) if error.is_closed() => {}
        Err(error) => {
            eprintln!("error: {error}");
            exit(1);
        }
    }
}

/// Comes back when the server is to take no more connections; within `GRACE` after that the process has ended.
async fn interrupt(handle: Handle) {
    if let Err(error) = tokio::signal::ctrl_c().await {
        return eprintln!("error: cannot wait for Ctrl-C: {error}");
    }
    println!("closing");
    // Waits for the forward that runs, so it needs a thread.
    thread::spawn(move || handle.close(Close::Refuse));
    thread::spawn(|| {
        thread::sleep(GRACE);
        println!("closed while a forward ran");
        // At once: what a process does at its end otherwise would crash the forward.
        signal_hook::low_level::exit(0);
    });
}

/// What a client may ask for. What is left out has the default of the library.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Ask {
    prompts: Vec<String>,
    /// Indexes, from the end where negative, and `final`.
    layers: Option<Vec<Value>>,
    pooling: Option<Vec<String>>,
    max_length: Option<usize>,
}

impl TryFrom<Ask> for ForwardRequest {
    type Error = PrefillError;

    fn try_from(ask: Ask) -> Result<Self, PrefillError> {
        let mut request = Self::builder(ask.prompts).max_length(ask.max_length);
        if let Some(layers) = ask.layers {
            request = request.layers(layers.iter().map(layer).collect::<Result<Vec<_>, _>>()?);
        }
        if let Some(names) = ask.pooling {
            let poolings = names.iter().map(|name| name.parse());
            request = request.pooling(poolings.collect::<Result<Vec<_>, _>>()?);
        }
        request.build()
    }
}

fn layer(value: &Value) -> Result<Layer, PrefillError> {
    let size = |index: i64| usize::try_from(index.unsigned_abs()).ok();
    let layer = match (value.as_str(), value.as_i64()) {
        (Some("final"), _) => Some(Layer::Final),
        (_, Some(index)) if index < 0 => size(index).map(Layer::FromEnd),
        (_, Some(index)) => size(index).map(Layer::Direct),
        _ => None,
    };
    layer.ok_or_else(|| PrefillError::InvalidRequest {
        field: "layers".to_owned(),
        value: value.to_string(),
        expected: "an index, or final".to_owned(),
        prompt: None,
    })
}

async fn features(
    State(handle): State<Handle>,
    ask: Result<Json<Ask>, JsonRejection>,
) -> Result<Response, Failure> {
    let Json(ask) = ask?;
    let request = ForwardRequest::try_from(ask)?;
    loaded(&handle)?;
    // This future is dropped if the client hangs up, and the request with it.
    let output = handle.forward(request).await?;
    Ok(Json(Answer::new(&output)).into_response())
}

/// The vectors as `[layers][prompts][hidden]`, and a receipt for each prompt.
#[derive(Serialize)]
struct Answer<'a> {
    layers: Vec<String>,
    last: Option<Vec<Vec<&'a [f32]>>>,
    mean: Option<Vec<Vec<&'a [f32]>>>,
    receipts: Vec<Value>,
}

impl<'a> Answer<'a> {
    fn new(output: &'a ForwardOutput) -> Self {
        let [_, prompts, hidden] = output.shape();
        let layers = |block: &'a [f32]| block.chunks(prompts * hidden);
        let rows = |layer: &'a [f32]| layer.chunks(hidden).collect();
        let block = |pooling| Some(layers(output.block(pooling)?).map(rows).collect());
        let receipts = output.receipts().iter().map(
            |receipt| json!({"tokens": receipt.tokens(), "used": receipt.used(), "cut": receipt.cut_range()}),
        );
        Self {
            layers: output.layers().iter().map(ToString::to_string).collect(),
            last: block(Pooling::Last),
            mean: block(Pooling::Mean),
            receipts: receipts.collect(),
        }
    }
}

async fn health(State(handle): State<Handle>) -> (StatusCode, Json<Value>) {
    let (ready, queue) = (handle.ready(), handle.queue());
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let QueueStatus { depth, in_flight, limit } = queue;
    let queue = json!({"depth": depth, "in_flight": in_flight, "limit": limit});
    (status, Json(json!({"ready": ready, "queue": queue})))
}

async fn describe(State(handle): State<Handle>) -> Result<Json<Value>, Failure> {
    let model = loaded(&handle)?;
    Ok(Json(json!({
        "id": model.id, "revision": model.revision, "layers": model.n_layers, "hidden": model.hidden_dim,
        "dtype": model.dtype, "device": model.device, "context_window": model.context_window,
        "layout": model.layout.slug(), "layout_reason": model.layout_reason,
    })))
}

fn loaded(handle: &Handle) -> Result<Arc<ModelInfo>, Failure> {
    handle.loaded().ok_or_else(|| Failure {
        status: StatusCode::SERVICE_UNAVAILABLE,
        kind: "loading",
        words: "the model is not loaded yet; try again later".to_owned(),
    })
}

/// An error as a client sees it: `{"error": {"kind": ..., "message": ...}}`.
struct Failure {
    status: StatusCode,
    kind: &'static str,
    words: String,
}

impl From<JsonRejection> for Failure {
    fn from(error: JsonRejection) -> Self {
        let kind = ErrorKind::InvalidRequest.slug();
        Self { status: StatusCode::BAD_REQUEST, kind, words: error.body_text() }
    }
}

impl From<PrefillError> for Failure {
    fn from(error: PrefillError) -> Self {
        let status = match error.kind() {
            ErrorKind::InvalidRequest | ErrorKind::ChatTemplate => StatusCode::BAD_REQUEST,
            ErrorKind::ContextWindowExceeded => StatusCode::PAYLOAD_TOO_LARGE,
            ErrorKind::Overloaded => StatusCode::TOO_MANY_REQUESTS,
            ErrorKind::Closed => StatusCode::SERVICE_UNAVAILABLE,
            ErrorKind::Deadline => StatusCode::GATEWAY_TIMEOUT,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self { status, kind: error.kind().slug(), words: error.to_string() }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let body = Json(json!({"error": {"kind": self.kind, "message": self.words}}));
        let later = [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE];
        if later.contains(&self.status) {
            return (self.status, [(header::RETRY_AFTER, "1")], body).into_response();
        }
        (self.status, body).into_response()
    }
}
