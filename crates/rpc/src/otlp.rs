//! Export of metrics and traces to an OpenTelemetry collector: OTLP over HTTP, in its JSON encoding.
//!
//! ```text
//!   events ──▶ spans: a bounded queue, which drops and counts ─┐
//!   metrics, every interval ───────────────────────────────────┴─▶ task of the control thread ── POST ──▶ collector
//! ```
//!
//! The task waits for the collector with time limits and blocks nothing else of the control thread. The data
//! path is not involved: metrics are those of `/metrics`, and spans follow from events.
//!
//! What is sent is defined by opentelemetry-proto 1.x; its JSON encoding has names in lowerCamelCase, 64-bit
//! integers as decimal strings, and identifiers in hexadecimal. The exporter is the feature `otlp`; without it
//! this module has only the configuration.

#[cfg(feature = "otlp")]
mod exporter;
#[cfg(feature = "otlp")]
mod http_post;
#[cfg(feature = "otlp")]
mod spans;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[cfg(feature = "otlp")]
pub(crate) use exporter::{Exporter, flush_at_end, run_exporter};

/// Whether this program can export: the feature `otlp` of this crate.
pub const HAS_OTLP: bool = cfg!(feature = "otlp");

/// Export of a process, a part of its [`ProcessParts`](crate::ProcessParts).
#[derive(Clone)]
pub struct OtlpExport {
    /// Where the collector is.
    pub endpoint: OtlpEndpoint,
    /// Addresses of its host.
    pub addresses: Vec<SocketAddr>,
    /// Attributes of this process.
    pub resource: Vec<(&'static str, String)>,
    /// Time between exports of the metrics.
    pub metrics_interval: Duration,
    /// Longest time for which spans are collected.
    pub spans_interval: Duration,
    /// Called when exports begin to fail, with the reason, and when they succeed again.
    pub report: fn(&OtlpEndpoint, Result<(), &str>),
    /// Counts.
    pub counters: Arc<OtlpCounters>,
}

/// URL of a collector without the path of a signal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtlpEndpoint {
    /// Host name or address.
    pub host: String,
    /// Port.
    pub port: u16,
    /// Path, without a slash at its end.
    path: String,
}

/// Exports of a process.
#[derive(Debug, Default)]
pub struct OtlpCounters {
    /// By [`OtlpSignal`]: requests that the collector accepted, and others.
    accepted: [AtomicU64; 2],
    failed: [AtomicU64; 2],
    dropped_spans: AtomicU64,
}

/// Kind of what is exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtlpSignal {
    /// Metrics.
    Metrics,
    /// Spans.
    Traces,
}

/// Port of OTLP over HTTP.
const DEFAULT_PORT: u16 = 4318;

impl OtlpEndpoint {
    /// Parses `http://HOST[:PORT][/PATH]`.
    ///
    /// # Errors
    ///
    /// What was found and what was expected.
    pub fn parse(url: &str) -> Result<Self, String> {
        let expected = "expected a URL such as http://127.0.0.1:4318";
        if url.starts_with("https://") {
            return Err(format!(
                "`{url}`: TLS is not supported, {expected}; a collector on this machine can forward with TLS"
            ));
        }
        let rest = url.strip_prefix("http://").ok_or_else(|| format!("`{url}`: {expected}"))?;
        let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
        let (host, port) = match authority.rsplit_once(':') {
            // The colons of an IPv6 address are in brackets.
            Some((host, port)) if !port.contains(']') => {
                (host, port.parse().map_err(|_| format!("`{url}`: port `{port}`, {expected}"))?)
            }
            _ => (authority, DEFAULT_PORT),
        };
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let is_graphic = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic());
        if host.is_empty() || host.contains(['@', '[', ']']) || !is_graphic(rest) {
            return Err(format!("`{url}`: {expected}"));
        }
        let path = path.trim_end_matches('/').to_owned();
        Ok(Self { host: host.to_owned(), port, path })
    }

    /// Host and port, as in a URL.
    #[must_use]
    pub fn authority(&self) -> String {
        let Self { host, port, .. } = self;
        if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
    }

    /// Path of a signal.
    #[cfg(feature = "otlp")]
    fn path_of(&self, signal: OtlpSignal) -> String {
        format!("{}/v1/{}", self.path, signal.name())
    }
}

impl fmt::Display for OtlpEndpoint {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "http://{}{}", self.authority(), self.path)
    }
}

impl OtlpSignal {
    /// Both.
    pub(crate) const ALL: [Self; 2] = [Self::Metrics, Self::Traces];

    /// Name of the signal: `metrics` or `traces`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Metrics => "metrics",
            Self::Traces => "traces",
        }
    }
}

// Relaxed: the counters publish nothing else.
impl OtlpCounters {
    #[cfg(feature = "otlp")]
    fn count_request(&self, signal: OtlpSignal, is_accepted: bool) {
        let counters = if is_accepted { &self.accepted } else { &self.failed };
        counters[signal as usize].fetch_add(1, Ordering::Relaxed);
    }

    #[cfg(feature = "otlp")]
    fn count_dropped_spans(&self, count: usize) {
        self.dropped_spans.fetch_add(count as u64, Ordering::Relaxed);
    }

    /// Requests that the collector accepted, and those that failed.
    pub(crate) fn requests(&self, signal: OtlpSignal) -> (u64, u64) {
        let [accepted, failed] = [&self.accepted, &self.failed]
            .map(|counters| counters[signal as usize].load(Ordering::Relaxed));
        (accepted, failed)
    }

    /// Spans that were dropped because the collector did not accept them in time.
    pub(crate) fn dropped_spans(&self) -> u64 {
        self.dropped_spans.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for OtlpExport {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("OtlpExport").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::OtlpEndpoint;

    #[test]
    fn endpoint_is_a_url_without_tls() {
        for (url, shown, host) in [
            ("http://127.0.0.1:4318", "http://127.0.0.1:4318", "127.0.0.1"),
            ("http://collector", "http://collector:4318", "collector"),
            ("http://collector/", "http://collector:4318", "collector"),
            ("http://[::1]:9/a/b/", "http://[::1]:9/a/b", "::1"),
            ("http://[::1]", "http://[::1]:4318", "::1"),
            ("http://p:9090/api/v1/otlp", "http://p:9090/api/v1/otlp", "p"),
        ] {
            let endpoint = OtlpEndpoint::parse(url).unwrap();
            assert_eq!((endpoint.to_string().as_str(), endpoint.host.as_str()), (shown, host));
        }
        for url in
            ["", "collector:4318", "http://", "http://:1", "http://a:b", "http://u@h", "http://a b"]
        {
            let refused = OtlpEndpoint::parse(url).unwrap_err();
            assert!(refused.contains("expected a URL such as http://127.0.0.1:4318"), "{refused}");
        }
        assert!(OtlpEndpoint::parse("https://a").unwrap_err().contains("TLS is not supported"));
        assert!(OtlpEndpoint::parse("http://a\r\nx").is_err(), "it becomes a line of a request");
    }
}
