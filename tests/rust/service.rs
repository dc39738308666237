//! The example `service`, as its clients meet it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use prefill_router::{ForwardRequest, Layer, Pooling, PrefillForward};
use serde_json::{Value, json};

use crate::child::Child;
use crate::compare::{assert_close, row};
use crate::fixtures::{case, environment};

const PATIENCE: Duration = Duration::from_secs(60);
/// From the interrupt to the end, however long the forward would take.
const SOON: Duration = Duration::from_secs(2);

struct Service {
    child: Child,
    address: String,
}

struct Answer {
    status: u16,
    head: String,
    body: Value,
}

impl Service {
    /// A service of the tiny Llama that listens, and loads.
    fn start(flags: &[&str]) -> Self {
        let folder = case("llama").folder.to_str().unwrap();
        let arguments = [&[folder, "--addr", "127.0.0.1:0"], flags].concat();
        let mut child = Child::example("service", &arguments, |command| {
            command.env("VIRTUAL_ENV", environment()).env("RUST_LOG", "prefill_router=debug");
        });
        let said = child.says();
        let address = said.strip_prefix("listening on ").unwrap_or_else(|| panic!("{said}"));
        Self { address: address.to_owned(), child }
    }

    fn is_ready(&mut self) {
        let said = self.child.says();
        assert!(said.starts_with("ready: 4 layers of "), "{said}");
    }

    /// Waits until so many requests run and wait.
    fn has(&self, in_flight: u64, depth: u64) {
        let start = Instant::now();
        loop {
            let queue = get(&self.address, "/health").body["queue"].clone();
            if (queue["in_flight"].as_u64(), queue["depth"].as_u64())
                == (Some(in_flight), Some(depth))
            {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "never {in_flight} and {depth}: {queue}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Gives its log.
    fn ends_after_an_interrupt(mut self) -> String {
        self.child.interrupt();
        let status = self.child.ends_within(SOON);
        assert_eq!(status.code(), Some(0), "{status}");
        self.child.succeeds()
    }
}

fn get(address: &str, path: &str) -> Answer {
    ask(address, &format!("GET {path} HTTP/1.1\r\n"), "").expect("an answer")
}

fn post(address: &str, body: &str) -> Answer {
    let line = "POST /v1/features HTTP/1.1\r\nContent-Type: application/json\r\n";
    ask(address, line, body).expect("an answer")
}

/// One request of a connection of its own; none if the connection ends without an answer.
fn ask(address: &str, line: &str, body: &str) -> Option<Answer> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let length = body.len();
    write!(
        stream,
        "{line}Host: here\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut text = Vec::new();
    drop(stream.read_to_end(&mut text));
    let text = String::from_utf8(text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Some(Answer { status, head: head.to_lowercase(), body: serde_json::from_str(body).unwrap() })
}

fn kind(answer: &Answer) -> &str {
    answer.body["error"]["kind"].as_str().unwrap()
}

#[allow(clippy::cast_possible_truncation)] // they were written as f32
fn numbers(vector: &Value) -> Vec<f32> {
    vector.as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect()
}

#[test]
fn clients_at_once_get_what_the_library_gives_and_typed_errors() {
    let mut service = Service::start(&[]);
    let early = post(&service.address, r#"{"prompts": ["hello"]}"#);
    assert_eq!((early.status, kind(&early)), (503, "loading"));
    assert!(early.head.contains("retry-after: 1"), "{}", early.head);
    let health = get(&service.address, "/health");
    assert_eq!((health.status, &health.body["ready"]), (503, &json!(false)));
    service.is_ready();
    let health = get(&service.address, "/health");
    assert_eq!((health.status, &health.body["ready"]), (200, &json!(true)));
    let model = get(&service.address, "/model").body;
    assert_eq!((&model["layers"], &model["hidden"]), (&json!(4), &json!(32)));

    let prompts = &case("llama").prompts;
    thread::scope(|scope| {
        for client in 0..8 {
            let address = &service.address;
            scope.spawn(move || {
                let prompts = [&prompts[client % prompts.len()], "hello"];
                let body = json!({"prompts": prompts, "layers": ["final", -1, client % 3], "pooling": ["mean"]});
                let answer = post(address, &body.to_string());
                assert_eq!(answer.status, 200, "{}", answer.body);
                let layers = [Layer::Direct(client % 3), Layer::Direct(3), Layer::Final];
                let request = ForwardRequest::builder(prompts).layers(layers).pooling([Pooling::Mean]);
                let expected = case("llama").forward().forward(&request.build().unwrap()).unwrap();
                assert_eq!(answer.body["layers"], json!([(client % 3).to_string(), "3", "final"]));
                assert_eq!(answer.body["last"], Value::Null);
                for (at, layer) in layers.into_iter().enumerate() {
                    for (prompt, receipt) in expected.receipts().iter().enumerate() {
                        let found = numbers(&answer.body["mean"][at][prompt]);
                        assert_close(&found, row(&expected, Pooling::Mean, layer, prompt), "a vector");
                        let told = json!({"tokens": receipt.tokens(), "used": receipt.used(), "cut": null});
                        assert_eq!(answer.body["receipts"][prompt], told);
                    }
                }
            });
        }
    });

    for (body, status, kind_) in [
        (r#"{"prompts": []}"#, 400, "invalid_request"),
        (r#"{"prompts": ["a"], "layers": ["first"]}"#, 400, "invalid_request"),
        (r#"{"prompts": ["a"], "layers": [4]}"#, 400, "invalid_request"),
        (r#"{"prompts": ["a"], "pooling": ["max"]}"#, 400, "invalid_request"),
        (r#"{"prompts": ["a"], "layer": [1]}"#, 400, "invalid_request"),
        (r#"{"prompts""#, 400, "invalid_request"),
        (r#"{"prompts": ["0123456789"], "max_length": 4}"#, 413, "context_window_exceeded"),
    ] {
        let answer = post(&service.address, body);
        assert_eq!((answer.status, kind(&answer)), (status, kind_), "{body}: {}", answer.body);
        assert!(!answer.body["error"]["message"].as_str().unwrap().is_empty());
    }
    let log = service.ends_after_an_interrupt();
    for phase in ["queued_us", "render_us", "tokenize_us", "forward_us", "pool_us"] {
        assert!(log.contains(phase), "no {phase}: {log}");
    }
}

#[test]
fn a_busy_service_refuses_is_late_and_ends_in_the_middle_of_a_forward() {
    let mut service = Service::start(&["--queue", "1", "--deadline", "3"]);
    service.is_ready();
    // Close to the 2 MB that a body may have: many seconds of work.
    let long =
        json!({"prompts": vec!["0123456789".repeat(70); 2700], "layers": ["final"]}).to_string();
    let send = |body: &str| {
        let (address, body) = (service.address.clone(), body.to_owned());
        let line = "POST /v1/features HTTP/1.1\r\nContent-Type: application/json\r\n";
        thread::spawn(move || ask(&address, line, &body))
    };
    let runs = send(&long);
    service.has(1, 0);
    let late = send(r#"{"prompts": ["hello"]}"#);
    service.has(1, 1);
    let refused = post(&service.address, r#"{"prompts": ["hello"]}"#);
    assert_eq!((refused.status, kind(&refused)), (429, "overloaded"));
    assert!(refused.head.contains("retry-after: 1"), "{}", refused.head);
    let late = late.join().unwrap().unwrap();
    assert_eq!((late.status, kind(&late)), (504, "deadline"));
    let waits = send(r#"{"prompts": ["hello"]}"#);
    service.has(1, 1);

    service.ends_after_an_interrupt();
    let closed = waits.join().unwrap().unwrap();
    assert_eq!((closed.status, kind(&closed)), (503, "closed"));
    assert!(runs.join().unwrap().is_none(), "the forward was over already");
}
