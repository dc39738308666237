//! The metrics, and the way to the host's recorder. Without the feature `metrics` there is none, and every call is empty.

/// What is counted, in the terms of the facade.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Counter,
    Gauge,
    /// A histogram of numbers.
    Sizes,
    /// A histogram of seconds.
    Seconds,
}

/// A metric. What it means is told by the table of the module above, and here in the words that a recorder is given.
#[derive(Debug)]
pub(super) struct Metric {
    pub name: &'static str,
    pub kind: Kind,
    /// The only label it has.
    pub label: Option<&'static str>,
    pub text: &'static str,
}

macro_rules! table {
    ($($id:ident = $name:literal, $kind:ident, $label:expr, $text:literal;)*) => {
        $(pub(super) const $id: Metric =
            Metric { name: $name, kind: Kind::$kind, label: $label, text: $text };)*
        const ALL: &[Metric] = &[$($id),*];
    };
}

#[rustfmt::skip]
table! {
    REQUESTS = "prefill_router_requests_total", Counter, Some("outcome"), "Requests that left a queue, by how";
    QUEUE_DEPTH = "prefill_router_queue_depth", Gauge, None, "Requests, warm-ups and unloads that wait";
    IN_FLIGHT = "prefill_router_in_flight", Gauge, None, "Requests, warm-ups and unloads that run";
    QUEUE_SECONDS = "prefill_router_queue_seconds", Seconds, None, "How long a request waited for its forward to begin";
    BATCH_REQUESTS = "prefill_router_batch_requests", Sizes, None, "Requests that were run together";
    BATCH_TOKENS = "prefill_router_batch_tokens", Sizes, None, "Tokens of requests that were run together, as estimated";
    BATCH_SECONDS = "prefill_router_batch_seconds", Seconds, None, "How long the backend took for what was run together";
    PROMPTS = "prefill_router_prompts_total", Counter, None, "Prompts that were encoded";
    TOKENS = "prefill_router_tokens_total", Counter, None, "Tokens of encoded prompts, without what was cut";
    TRUNCATED = "prefill_router_truncated_total", Counter, None, "Prompts that were cut";
    PHASE_SECONDS = "prefill_router_phase_seconds", Seconds, Some("phase"), "How long a phase of a run took";
}

#[cfg(feature = "metrics")]
mod recorder {
    use metrics::{
        Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
    };

    use super::{ALL, Kind, Metric};

    /// Gives the installed recorder units and texts of every metric. To be called once, after installing it.
    pub fn describe_metrics() {
        for metric in ALL {
            match metric.kind {
                Kind::Counter => describe_counter!(metric.name, Unit::Count, metric.text),
                Kind::Gauge => describe_gauge!(metric.name, Unit::Count, metric.text),
                Kind::Sizes => describe_histogram!(metric.name, Unit::Count, metric.text),
                Kind::Seconds => describe_histogram!(metric.name, Unit::Seconds, metric.text),
            }
        }
    }

    /// Adds to a counter. `label` is the value of the label it has.
    pub fn count(metric: &Metric, label: &'static str, by: usize) {
        let plain = || counter!(metric.name);
        let labelled = |name| counter!(metric.name, name => label);
        metric.label.map_or_else(plain, labelled).increment(by as u64);
    }

    /// Adds to a gauge. Never set: changes of several threads and several queues add up in any order.
    #[allow(clippy::cast_precision_loss)] // the facade has no integers here, and no queue is that long
    pub fn shift(metric: &Metric, by: isize) {
        gauge!(metric.name).increment(by as f64);
    }

    /// Adds to a histogram. `label` is the value of the label it has.
    pub fn sample(metric: &Metric, label: &'static str, value: f64) {
        let plain = || histogram!(metric.name);
        let labelled = |name| histogram!(metric.name, name => label);
        metric.label.map_or_else(plain, labelled).record(value);
    }
}

#[cfg(not(feature = "metrics"))]
mod recorder {
    use super::Metric;

    pub fn count(_: &Metric, _: &'static str, _: usize) {}
    pub fn shift(_: &Metric, _: isize) {}
    pub fn sample(_: &Metric, _: &'static str, _: f64) {}
}

#[cfg(feature = "metrics")]
pub use recorder::describe_metrics;
pub(super) use recorder::{count, sample, shift};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documented_table_is_this_one() {
        let documented: Vec<_> = include_str!("mod.rs")
            .lines()
            .filter_map(|line| line.strip_prefix("//! | `prefill_router_"))
            .map(|row| {
                let mut cells = row.split('|').map(|cell| cell.trim().replace('`', ""));
                [cells.next().unwrap(), cells.next().unwrap(), cells.next().unwrap()]
            })
            .collect();
        let made: Vec<_> = ALL
            .iter()
            .map(|metric| {
                let kind = match metric.kind {
                    Kind::Counter => "counter",
                    Kind::Gauge => "gauge",
                    Kind::Sizes | Kind::Seconds => "histogram",
                };
                let name = metric.name.strip_prefix("prefill_router_").unwrap();
                [name, kind, metric.label.unwrap_or("")].map(str::to_owned)
            })
            .collect();
        assert_eq!(documented, made);
    }

    #[test]
    fn names_tell_kinds() {
        for Metric { name, kind, .. } in ALL {
            assert_eq!(name.ends_with("_total"), *kind == Kind::Counter, "{name}");
            assert_eq!(name.ends_with("_seconds"), *kind == Kind::Seconds, "{name}");
        }
    }
}
