//! Processes of their own: this test binary started again, with one of the mains in `situations`, or an example.
//!
//! A child says what it has to say in lines, which begin with `child: ` where it is this binary, and never outlives its test.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child as Process, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use std::{env, thread};

use serde_json::Value;

use crate::fixtures::{keep_bytecode, root};

/// Names the situation to a child.
pub const SITUATION: &str = "PREFILL_ROUTER_TEST_SITUATION";
/// JSON, what the situation needs to know.
pub const ARGUMENTS: &str = "PREFILL_ROUTER_TEST_ARGUMENTS";
/// Long enough to import torch on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);

pub struct Child {
    process: Process,
    lines: Receiver<String>,
    errors: Option<thread::JoinHandle<String>>,
}

impl Child {
    /// Starts a child in the folder of the crate, without what a test run puts into the environment.
    pub fn start(situation: &str, arguments: &Value, setup: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .args(["situations::main", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .current_dir(root())
            .env(SITUATION, situation)
            .env(ARGUMENTS, arguments.to_string());
        // The test harness may have written in front of it.
        Self::spawn(command, "child: ", setup)
    }

    /// Starts an example of the crate, whose every line is something it says.
    pub fn example(name: &str, arguments: &[&str], setup: impl FnOnce(&mut Command)) -> Self {
        // Cargo builds it if need be, and becomes it.
        let mut command = Command::new(env!("CARGO"));
        command.args(["run", "--quiet", "--locked", "--example", name, "--"]).args(arguments);
        command.current_dir(root());
        Self::spawn(command, "", setup)
    }

    fn spawn(mut command: Command, mark: &'static str, setup: impl FnOnce(&mut Command)) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        keep_bytecode(&mut command);
        // Cargo sets the first; the others are for the test at hand to set.
        for name in [
            "LD_LIBRARY_PATH",
            "DYLD_LIBRARY_PATH",
            "PYTHONPATH",
            "PYTHONHOME",
            "VIRTUAL_ENV",
            "PREFILL_ROUTER_PYTHON",
        ] {
            command.env_remove(name);
        }
        setup(&mut command);
        let mut process = command.spawn().unwrap();
        let (stdout, mut stderr) = (process.stdout.take().unwrap(), process.stderr.take().unwrap());
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if let Some((_, said)) = line.split_once(mark) {
                    drop(sender.send(said.to_owned()));
                }
            }
        });
        let errors = thread::spawn(move || {
            let mut bytes = Vec::new();
            drop(stderr.read_to_end(&mut bytes));
            String::from_utf8_lossy(&bytes).into_owned()
        });
        Self { process, lines, errors: Some(errors) }
    }

    /// The next thing it says.
    pub fn says(&mut self) -> String {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(said) => said,
            Err(RecvTimeoutError::Timeout) => panic!("the child has hung: {}", self.kill()),
            Err(RecvTimeoutError::Disconnected) => panic!("the child has gone: {}", self.kill()),
        }
    }

    /// The next thing it says, which is JSON.
    pub fn tells(&mut self) -> Value {
        let said = self.says();
        serde_json::from_str(&said).unwrap_or_else(|error| panic!("{said}: {error}"))
    }

    /// Waits until it says exactly that.
    pub fn expect(&mut self, word: &str) {
        assert_eq!(self.says(), word);
    }

    /// Whether it has nothing more to say.
    pub fn is_silent(&self) -> bool {
        self.lines.try_recv().is_err()
    }

    #[allow(unsafe_code)]
    pub fn interrupt(&self) {
        let process = libc::pid_t::try_from(self.process.id()).unwrap();
        // SAFETY: kill takes any numbers; the child has not been waited for, so the number is still its own.
        assert_eq!(unsafe { libc::kill(process, libc::SIGINT) }, 0);
    }

    /// Waits for its end, at most that long.
    pub fn ends_within(&mut self, limit: Duration) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() <= limit, "the child does not end: {}", self.kill());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits for its end, which is a good one, and gives what it wrote to stderr.
    pub fn succeeds(mut self) -> String {
        let status = self.ends_within(PATIENCE);
        let errors = self.kill();
        assert!(status.success(), "{status}: {errors}");
        errors
    }

    /// Ends it if need be, and gives what it wrote to stderr.
    fn kill(&mut self) -> String {
        drop(self.process.kill());
        drop(self.process.wait());
        self.errors.take().and_then(|errors| errors.join().ok()).unwrap_or_default()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}
