//! Task that sends metrics and spans to the collector.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout};

use super::http_post::{PostError, post};
use super::spans::{BATCH, SpanQueue, attribute, traces_request};
use super::{OtlpExport, OtlpSignal};
use crate::event::Event;
use crate::metrics::otlp_metrics;
use crate::process_parts::ProcessParts;

/// Exporter of a process.
pub(crate) struct Exporter {
    export: OtlpExport,
    parts: ProcessParts,
    queue: RefCell<SpanQueue>,
    /// Notified when a batch of spans is complete.
    is_batch_full: Notify,
    /// Whether the last request failed.
    is_failing: Cell<bool>,
}

/// Pause after a request that may succeed later.
const RETRY_PAUSE: Duration = Duration::from_secs(5);

impl Exporter {
    /// The exporter of a process with these parts, if it has a collector.
    pub(crate) fn of_parts(parts: &ProcessParts) -> Option<Self> {
        let export = parts.find_part::<OtlpExport>("collector").ok()?.clone();
        Some(Self {
            export,
            parts: parts.clone(),
            queue: RefCell::new(SpanQueue::new(tenmil_linux::random_seed())),
            is_batch_full: Notify::new(),
            is_failing: Cell::new(false),
        })
    }

    /// Adds the spans of an event.
    pub(crate) fn record(&self, event: &Event) {
        let mut queue = self.queue.borrow_mut();
        let dropped = queue.record(now_unix_ns(), event);
        self.export.counters.count_dropped_spans(dropped);
        if queue.len() >= BATCH {
            self.is_batch_full.notify_one();
        }
    }

    async fn send_metrics(&self) {
        let body = otlp_metrics(&self.parts, &self.resource(), &scope(), now_unix_ns());
        let _ = self.send(OtlpSignal::Metrics, &body.to_string()).await;
    }

    /// Sends all spans that wait. Returns whether that succeeded.
    async fn send_spans(&self) -> bool {
        loop {
            let spans = self.queue.borrow_mut().take_batch();
            if spans.is_empty() {
                return true;
            }
            let body = traces_request(&self.resource(), &scope(), &spans).to_string();
            let Err(why) = self.send(OtlpSignal::Traces, &body).await else { continue };
            let dropped = match why.is_temporary {
                true => self.queue.borrow_mut().put_back(spans),
                false => spans.len(),
            };
            self.export.counters.count_dropped_spans(dropped);
            return false;
        }
    }

    async fn send(&self, signal: OtlpSignal, body: &str) -> Result<(), PostError> {
        let OtlpExport { endpoint, addresses, report, counters, .. } = &self.export;
        let result = post(endpoint, addresses, signal, body).await;
        counters.count_request(signal, result.is_ok());
        if self.is_failing.replace(result.is_err()) != result.is_err() {
            let reason = |why: &PostError| format!("{}: {}", signal.name(), why.reason);
            match &result {
                Ok(()) => report(endpoint, Ok(())),
                Err(why) => report(endpoint, Err(&reason(why))),
            }
        }
        result
    }

    fn resource(&self) -> Value {
        let attributes = self.export.resource.iter().filter_map(|(name, value)| {
            let mut attribute = attribute(name, &json!(value))?;
            attribute["key"] = json!(name);
            Some(attribute)
        });
        json!({ "attributes": attributes.collect::<Vec<_>>() })
    }
}

/// Sends metrics and spans at their intervals, until it is dropped.
pub(crate) async fn run_exporter(exporter: &Exporter) {
    let OtlpExport { metrics_interval, spans_interval, .. } = exporter.export;
    let mut metrics_at = Instant::now() + metrics_interval;
    let mut spans_at = Instant::now() + spans_interval;
    loop {
        tokio::select! {
            () = sleep_until(metrics_at.min(spans_at)) => {}
            () = exporter.is_batch_full.notified() => spans_at = spans_at.min(Instant::now()),
        }
        if Instant::now() >= metrics_at {
            exporter.send_metrics().await;
            metrics_at = Instant::now() + metrics_interval;
        }
        if Instant::now() >= spans_at {
            let is_sent = exporter.send_spans().await;
            let pause = if is_sent { spans_interval } else { spans_interval.max(RETRY_PAUSE) };
            spans_at = Instant::now() + pause;
        }
    }
}

/// Sends what is left when the process ends, within a time limit.
pub(crate) async fn flush_at_end(exporter: &Exporter, limit: Duration) {
    let flush = async {
        exporter.send_spans().await;
        exporter.send_metrics().await;
    };
    let _ = timeout(limit, flush).await;
}

fn scope() -> Value {
    json!({ "name": "tenmil", "version": env!("CARGO_PKG_VERSION") })
}

fn now_unix_ns() -> u64 {
    tenmil_linux::clock::utc_now().unix_us.saturating_mul(1_000)
}
