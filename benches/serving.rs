//! Thirty-two callers of one model: a handle against a mutex around the same backend.
//!
//!     cargo bench --bench serving -- MODEL [--prompts FILE.jsonl] [--rounds 5] [--requests 96]
//!         [--max-wait-ms 2] [--max-tokens 2048]
//!
//! Each caller asks for one prompt of 24 to 115 tokens (upper half, both poolings), waits, and asks for the next. Rounds
//! of the same requests alternate, because the machine may be shared; what is quoted is the median of the ratios.
#![allow(clippy::cast_precision_loss)] // a few hundred requests

use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use prefill_router::batching::{BatchedConfig, BatchedForward, Close};
use prefill_router::{
    ForwardOutput, ForwardRequest, Layer, ModelInfo, Pooling, PrefillForward, Result,
    TransformersConfig, TransformersForward,
};
use serde_json::Value;

const CALLERS: usize = 32;
const TOKENS: RangeInclusive<usize> = 24..=115;

fn main() -> Result<()> {
    let model = env::args().nth(1).filter(|argument| !argument.starts_with("--"));
    let model = model.expect("the model's folder comes first");
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/prompts.jsonl");
    let prompts = prompts(Path::new(&flag("--prompts", own.to_str().expect("Unicode"))));
    let number = |name, default| flag(name, default).parse::<usize>().expect("a number");
    let (rounds, count) = (number("--rounds", "5"), number("--requests", "96"));

    let config = TransformersConfig::new(model).device("cpu").dtype("float32");
    let backend = Shared(Arc::new(Mutex::new(TransformersForward::new(config)?)));
    let requests = requests(&backend, prompts)?;
    let requests: Vec<_> = requests.iter().cycle().take(count).cloned().collect();
    let config = BatchedConfig::new()
        .max_wait(Duration::from_millis(number("--max-wait-ms", "2") as u64))
        .max_tokens(number("--max-tokens", "2048"));
    let handle = BatchedForward::spawn(backend.clone(), config)?;

    let by_mutex = |request: &Arc<ForwardRequest>| backend.lock().forward(request);
    let by_handle = |request: &Arc<ForwardRequest>| handle.forward_blocking(request.clone());
    // What happens once only is not measured.
    round(&requests[..count.min(CALLERS)], &by_handle);
    let (mut mutexes, mut handles) = (Vec::new(), Vec::new());
    for at in 0..rounds {
        // Each goes first in turn.
        if at % 2 == 0 {
            mutexes.push(round(&requests, &by_mutex));
            handles.push(round(&requests, &by_handle));
        } else {
            handles.push(round(&requests, &by_handle));
            mutexes.push(round(&requests, &by_mutex));
        }
        mutexes[at].print("mutex");
        handles[at].print("handle");
    }
    handle.close(Close::Drain);
    print_ratios("throughput", &mutexes, &handles, Round::per_second);
    print_ratios("p50", &mutexes, &handles, |round| round.quantile(0.50).as_secs_f64());
    print_ratios("p95", &mutexes, &handles, |round| round.quantile(0.95).as_secs_f64());
    Ok(())
}

/// The word behind a flag.
fn flag(name: &str, default: &str) -> String {
    env::args().skip_while(|word| word != name).nth(1).unwrap_or_else(|| default.to_owned())
}

/// The field `prompt` of every line.
fn prompts(file: &Path) -> Vec<String> {
    let text = fs::read_to_string(file).expect("a file of prompts");
    let prompt = |line: &str| -> Option<String> {
        let line: Value = serde_json::from_str(line).ok()?;
        Some(line["prompt"].as_str()?.to_owned())
    };
    text.lines().map(|line| prompt(line).expect("a field `prompt`")).collect()
}

/// A request for each prompt of the right length.
fn requests(backend: &Shared, prompts: Vec<String>) -> Result<Vec<Arc<ForwardRequest>>> {
    // The embeddings cost no block, and their receipts count the tokens.
    let count = ForwardRequest::builder(prompts.iter().cloned()).layers([Layer::Direct(0)]);
    let counted = backend.lock().forward(&count.pooling([Pooling::Last]).build()?)?;
    let kept = prompts.into_iter().zip(counted.receipts());
    let kept: Vec<_> = kept.filter(|(_, receipt)| TOKENS.contains(&receipt.tokens())).collect();
    let tokens: usize = kept.iter().map(|(_, receipt)| receipt.tokens()).sum();
    assert!(!kept.is_empty(), "no prompt of {TOKENS:?} tokens");
    println!("{} prompts, {} tokens on average", kept.len(), tokens / kept.len());
    kept.into_iter().map(|(prompt, _)| Ok(Arc::new(ForwardRequest::new([prompt])?))).collect()
}

/// One backend for both ways, so that they share its memory and its luck.
#[derive(Clone)]
struct Shared(Arc<Mutex<TransformersForward>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, TransformersForward> {
        self.0.lock().expect("no panic")
    }
}

impl PrefillForward for Shared {
    fn forward(&mut self, request: &ForwardRequest) -> Result<ForwardOutput> {
        self.lock().forward(request)
    }

    fn forward_many(&mut self, requests: &[&ForwardRequest]) -> Vec<Result<ForwardOutput>> {
        self.lock().forward_many(requests)
    }

    fn model(&mut self) -> Result<Arc<ModelInfo>> {
        self.lock().model()
    }

    fn unload(&mut self) -> Result<()> {
        self.lock().unload()
    }
}

/// How long it took, and each request in it, in order.
struct Round {
    took: Duration,
    latencies: Vec<Duration>,
}

/// All requests, each by the next caller that is free.
fn round(
    requests: &[Arc<ForwardRequest>],
    ask: &(impl Fn(&Arc<ForwardRequest>) -> Result<ForwardOutput> + Sync),
) -> Round {
    let next = AtomicUsize::new(0);
    let caller = || {
        let mut latencies = Vec::new();
        while let Some(request) = requests.get(next.fetch_add(1, Ordering::Relaxed)) {
            let start = Instant::now();
            ask(request).expect("an output");
            latencies.push(start.elapsed());
        }
        latencies
    };
    let start = Instant::now();
    let mut latencies: Vec<_> = thread::scope(|scope| {
        let callers: Vec<_> = (0..CALLERS).map(|_| scope.spawn(caller)).collect();
        callers.into_iter().flat_map(|caller| caller.join().expect("no panic")).collect()
    });
    let took = start.elapsed();
    latencies.sort_unstable();
    Round { took, latencies }
}

impl Round {
    fn per_second(&self) -> f64 {
        self.latencies.len() as f64 / self.took.as_secs_f64()
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // an index of the list
    fn quantile(&self, quantile: f64) -> Duration {
        let last = self.latencies.len() - 1;
        self.latencies[(last as f64 * quantile).round() as usize]
    }

    fn print(&self, way: &str) {
        let (rate, p50, p95) = (self.per_second(), self.quantile(0.50), self.quantile(0.95));
        println!("{way:<7} {rate:>6.2} requests/s, p50 {p50:>8.0?}, p95 {p95:>8.0?}");
    }
}

/// The medians of both ways, and of the ratio within each round with its extremes.
fn print_ratios(what: &str, mutexes: &[Round], handles: &[Round], of: impl Fn(&Round) -> f64) {
    let median = |mut numbers: Vec<f64>| {
        numbers.sort_unstable_by(f64::total_cmp);
        (numbers[numbers.len() / 2], numbers[0], numbers[numbers.len() - 1])
    };
    let (mutex, ..) = median(mutexes.iter().map(&of).collect());
    let (handle, ..) = median(handles.iter().map(&of).collect());
    let ratios = mutexes.iter().zip(handles).map(|(mutex, handle)| of(handle) / of(mutex));
    let (ratio, least, most) = median(ratios.collect());
    println!(
        "{what:<11} mutex {mutex:.2}, handle {handle:.2}; {ratio:.2}x ({least:.2} to {most:.2})"
    );
}
