//! A subscriber that writes down what it sees: each span when it ends, each event when it comes.

use std::sync::{Arc, Mutex};
use std::{fmt, mem};

use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::{LookupSpan, Registry};

#[derive(Clone, Default)]
pub struct Collector(Arc<Mutex<Vec<Value>>>);

impl Collector {
    /// One that sees everything in this process, up to that level, of the crate and of what tests say themselves.
    pub fn install(level: Level) -> Self {
        let collector = Self::default();
        let targets = tracing_subscriber::filter::EnvFilter::new(format!("{level}"));
        let subscriber = Registry::default().with(collector.clone().with_filter(targets));
        tracing::subscriber::set_global_default(subscriber).unwrap();
        collector
    }

    /// What it has seen since it was asked before.
    pub fn seen(&self) -> Vec<Value> {
        mem::take(&mut self.0.lock().unwrap())
    }

    fn add(&self, seen: Value) {
        self.0.lock().unwrap().push(seen);
    }
}

/// What is known of a span that has not ended.
struct Open {
    fields: Fields,
    follows: Vec<&'static str>,
}

#[derive(Default)]
struct Fields(Map<String, Value>);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().to_owned(), json!(format!("{value:?}")));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), json!(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().to_owned(), json!(value));
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Collector {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        let span = context.span(id).unwrap();
        span.extensions_mut().insert(Open { fields, follows: Vec::new() });
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let span = context.span(id).unwrap();
        values.record(&mut span.extensions_mut().get_mut::<Open>().unwrap().fields);
    }

    fn on_follows_from(&self, id: &Id, follows: &Id, context: Context<'_, S>) {
        let name = context.span(follows).unwrap().name();
        let span = context.span(id).unwrap();
        span.extensions_mut().get_mut::<Open>().unwrap().follows.push(name);
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let message = fields.0.remove("message");
        let within: Vec<_> =
            context.event_scope(event).into_iter().flatten().map(|span| span.name()).collect();
        self.add(json!({
            "event": message,
            "level": event.metadata().level().as_str(),
            "target": event.metadata().target(),
            "fields": fields.0,
            "within": within,
        }));
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let span = context.span(&id).unwrap();
        let open = span.extensions_mut().remove::<Open>().unwrap();
        self.add(json!({
            "span": span.name(),
            "level": span.metadata().level().as_str(),
            "target": span.metadata().target(),
            "parent": span.parent().map(|parent| parent.name()),
            "fields": open.fields.0,
            "follows": open.follows,
        }));
    }
}
