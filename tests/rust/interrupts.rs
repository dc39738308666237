//! Ctrl-C stays the host's (case 19): before, during and after Python.

use std::os::unix::process::ExitStatusExt;
use std::thread::sleep;
use std::time::Duration;

use serde_json::json;

use crate::child::Child;
use crate::fixtures::{case, environment};

/// How long a process may take to die of an interrupt.
const SOON: Duration = Duration::from_secs(5);

fn start(situation: &str) -> Child {
    Child::start(situation, &json!({"folder": case("llama").folder}), |command| {
        command.env("VIRTUAL_ENV", environment());
    })
}

/// Interrupts it, and sees it die of that.
fn dies_of_an_interrupt(mut child: Child) {
    child.interrupt();
    let status = child.ends_within(SOON);
    assert_eq!(status.signal(), Some(libc::SIGINT), "{status}");
}

#[test]
fn an_interrupt_does_what_it_did_before_python_and_ends_an_idle_process() {
    let mut child = start("idle");
    let told = child.tells();
    assert_eq!(told, json!({"imported": "default", "forward": "default"}));
    dies_of_an_interrupt(child);
}

#[test]
fn an_interrupt_ends_a_process_that_imports() {
    let mut child = start("import");
    child.expect("imports");
    // Into the import of torch, which takes longer than this.
    sleep(Duration::from_millis(400));
    assert!(child.is_silent(), "it has imported already");
    dies_of_an_interrupt(child);
}

#[test]
fn an_interrupt_ends_a_process_in_a_long_forward() {
    let mut child = start("long forward");
    child.expect("runs");
    sleep(Duration::from_secs(1));
    assert!(child.is_silent(), "the forward is over already");
    dies_of_an_interrupt(child);
}

#[test]
fn a_handler_of_the_host_runs_and_the_forward_goes_on() {
    let mut child = start("host handler");
    child.expect("runs");
    child.interrupt();
    child.expect("handled");
    child.interrupt();
    child.expect("handled again");
    child.succeeds();
}
