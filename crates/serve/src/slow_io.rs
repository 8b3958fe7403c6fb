//! Slow-I/O log: commands that took longer than a threshold, with the time of each stage.
//!
//! ```text
//!   received ─ wait ─▶ data requested ─ transfer ─▶ ready ─ queue ─▶ submitted ─ device ─▶ completed ─ send ─▶ sent
//!
//!   reactor 0 ─┐
//!   reactor 1 ─┴─▶ bounded queue, which drops and counts ─▶ main loop: log lines and events
//! ```
//!
//! A command counts as slow if it took as long as the threshold from its reception to its completion by the
//! device. The times are those of the iterations of its reactor, so stages within one iteration take no time, and
//! the stages add up to the whole.

mod export;
mod served_device;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tenmil_base::{Instant, Span, UtcTime};
use tenmil_linux::{Receiver, Sender, mailbox};

pub use export::ExportSlowIo;
pub use served_device::DeviceSlowIo;

/// Log of a server, shared by its reactors and the loop that writes it.
#[derive(Clone, Debug)]
pub struct SlowIoLog {
    shared: Arc<SlowIoQueue>,
}

#[derive(Debug)]
struct SlowIoQueue {
    sender: Sender<SlowIo>,
    receiver: Mutex<Receiver<SlowIo>>,
    dropped: AtomicU64,
    /// Of these, how many were reported.
    reported: AtomicU64,
}

/// Thresholds of an export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlowIoThresholds {
    /// Of all namespaces that are not listed; `None`: their commands are not logged.
    pub default: Option<Span>,
    /// Of these namespaces.
    pub namespaces: BTreeMap<u32, Option<Span>>,
}

/// Slow command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlowIo {
    /// Export, client and queue.
    pub source: Arc<SlowIoSource>,
    /// Operation.
    pub operation: &'static str,
    /// Namespace identifier, for protocols that have several.
    pub namespace: Option<u32>,
    /// First block, or first byte if there is no namespace.
    pub start: Option<u64>,
    /// Length of the data in bytes.
    pub len_bytes: u64,
    /// Command identifier, cookie of an NBD request, or number of a request of a served device.
    pub id: u64,
    /// Name of the status; `None` if the command succeeded.
    pub error: Option<String>,
    /// When it was received.
    pub received_at: Instant,
    /// Time of each stage.
    pub stages: SlowIoStages,
    /// When the last stage ended, set by the log.
    pub ended_at: UtcTime,
}

/// Where a command came from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlowIoSource {
    /// Protocol: `nvme-tcp`, `nbd`, `vfio-user`, `vhost-user` or `ublk`.
    pub protocol: &'static str,
    /// NQN of the subsystem, name of the NBD export, or where a device is served.
    pub export: String,
    /// NQN of the host, if the protocol has one.
    pub host: Option<String>,
    /// Address of the client; empty if the protocol has none.
    pub peer: String,
    /// Controller and queue identifier.
    pub queue: Option<(u16, u16)>,
}

/// Time of each stage of a command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlowIoStages {
    /// Until its data were requested: it waited for memory or a rate limit. Of a command without data from
    /// the client, until it was ready to execute.
    pub wait: Span,
    /// Until its data were complete; `None` if it has none from the client.
    pub transfer: Option<Span>,
    /// Until it was submitted to the device.
    pub queue: Span,
    /// Until the device completed it.
    pub device: Span,
    /// Until its response was sent; `None` if it was not.
    pub send: Option<Span>,
}

/// Capacity of the queue.
const QUEUED_MAX: usize = 256;

impl Default for SlowIoLog {
    fn default() -> Self {
        let (sender, receiver) = mailbox(QUEUED_MAX);
        let (receiver, dropped, reported) =
            (Mutex::new(receiver), Default::default(), Default::default());
        let shared = SlowIoQueue { sender, receiver, dropped, reported };
        Self { shared: Arc::new(shared) }
    }
}

impl SlowIoLog {
    /// Appends a command. Does not block; if the queue is full, the command is dropped and counted.
    pub(crate) fn append(&self, command: SlowIo) {
        let command = SlowIo { ended_at: tenmil_linux::clock::utc_now(), ..command };
        if self.shared.sender.send(command).is_err() {
            // Relaxed: a counter that publishes nothing else.
            self.shared.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Next command, oldest first.
    #[must_use]
    pub fn next_command(&self) -> Option<SlowIo> {
        self.shared.receiver.lock().unwrap_or_else(PoisonError::into_inner).receive()
    }

    /// Number of commands that were dropped since the last call.
    #[must_use]
    pub fn take_dropped(&self) -> u64 {
        let dropped = self.dropped();
        dropped - self.shared.reported.swap(dropped, Ordering::Relaxed)
    }

    /// Number of commands that were dropped since the start.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.shared.dropped.load(Ordering::Relaxed)
    }
}

impl SlowIoThresholds {
    /// Threshold of a namespace.
    #[must_use]
    pub fn of_namespace(&self, nsid: u32) -> Option<Span> {
        self.namespaces.get(&nsid).copied().unwrap_or(self.default)
    }

    /// Smallest threshold; `None` if no command is logged.
    #[must_use]
    pub fn smallest(&self) -> Option<Span> {
        self.namespaces.values().copied().flatten().chain(self.default).min()
    }
}

impl SlowIoStages {
    /// Sum of the stages.
    #[must_use]
    pub fn total(&self) -> Span {
        let Self { wait, transfer, queue, device, send } = *self;
        let optional = [transfer, send].into_iter().flatten();
        Span { ns: [wait, queue, device].into_iter().chain(optional).map(|stage| stage.ns).sum() }
    }
}

impl fmt::Display for SlowIo {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { source, operation, namespace, start, len_bytes, id, error, stages, .. } = self;
        write!(out, "slow I/O: {operation} of {}", source.export)?;
        if let Some(namespace) = namespace {
            write!(out, " namespace {namespace}")?;
        }
        match (start, namespace) {
            (Some(block), Some(_)) => write!(out, ", block {block}, {len_bytes} bytes")?,
            (Some(offset), None) => write!(out, ", {len_bytes} bytes at {offset}")?,
            (None, _) => {}
        }
        write!(out, ": {}, {stages}; ", Milliseconds(stages.total()))?;
        match &source.host {
            Some(host) => write!(out, "host {host} at {}, ", source.peer)?,
            None if source.peer.is_empty() => {}
            None => write!(out, "client {}, ", source.peer)?,
        }
        if let Some((controller, queue)) = source.queue {
            write!(out, "controller {controller}, queue {queue}, ")?;
        }
        write!(out, "command {id:#x}, ")?;
        match error {
            Some(status) => write!(out, "failed: {status}"),
            None => out.write_str("success"),
        }
    }
}

impl fmt::Display for SlowIoStages {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { wait, transfer, queue, device, send } = *self;
        write!(out, "wait {}", Milliseconds(wait))?;
        if let Some(transfer) = transfer {
            write!(out, ", transfer {}", Milliseconds(transfer))?;
        }
        write!(out, ", queue {}, device {}", Milliseconds(queue), Milliseconds(device))?;
        match send {
            Some(send) => write!(out, ", send {}", Milliseconds(send)),
            None => out.write_str(", not sent"),
        }
    }
}

/// A time in milliseconds, to the microsecond.
struct Milliseconds(Span);

impl fmt::Display for Milliseconds {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = self.0.ns / 1_000;
        write!(out, "{}.{:03} ms", us / 1_000, us % 1_000)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tenmil_base::{Instant, Span, UtcTime};

    use super::{QUEUED_MAX, SlowIo, SlowIoLog, SlowIoSource, SlowIoStages, SlowIoThresholds};

    fn command(id: u64) -> SlowIo {
        let source = SlowIoSource {
            protocol: "nvme-tcp",
            export: "nqn.2026-01.org.example:disk".into(),
            host: Some("nqn.2026-01.org.example:db".into()),
            peer: "10.0.0.7:41000".into(),
            queue: Some((3, 1)),
        };
        let stages = SlowIoStages {
            wait: Span::from_us(5),
            transfer: Some(Span::from_us(250)),
            queue: Span::default(),
            device: Span::from_ms(20),
            send: Some(Span::from_us(40)),
        };
        SlowIo {
            source: Arc::new(source),
            operation: "Write",
            namespace: Some(1),
            start: Some(4096),
            len_bytes: 8192,
            id,
            error: None,
            received_at: Instant { ns: 7 },
            stages,
            ended_at: UtcTime { unix_us: 0 },
        }
    }

    #[test]
    fn slow_command_is_one_line_with_stages_that_add_up() {
        assert_eq!(
            command(0x1f).to_string(),
            "slow I/O: Write of nqn.2026-01.org.example:disk namespace 1, block 4096, 8192 bytes: 20.295 ms, \
             wait 0.005 ms, transfer 0.250 ms, queue 0.000 ms, device 20.000 ms, send 0.040 ms; host \
             nqn.2026-01.org.example:db at 10.0.0.7:41000, controller 3, queue 1, command 0x1f, success"
        );
    }

    #[test]
    fn full_queue_drops_and_counts() {
        let log = SlowIoLog::default();
        (0..QUEUED_MAX as u64 + 3).for_each(|id| log.append(command(id)));
        assert_eq!(log.dropped(), 3);
        assert_eq!(log.next_command().unwrap().id, 0);
        assert_eq!(std::iter::from_fn(|| log.next_command()).count(), QUEUED_MAX - 1);
        log.append(command(9));
        assert_eq!((log.next_command().unwrap().id, log.dropped()), (9, 3));
        assert_eq!((log.take_dropped(), log.take_dropped()), (3, 0));
    }

    #[test]
    fn threshold_of_a_namespace_replaces_the_default() {
        let (short, long) = (Some(Span::from_ms(1)), Some(Span::from_ms(9)));
        let namespaces = [(2, short), (3, None)].into();
        let thresholds = SlowIoThresholds { default: long, namespaces };
        let found = [1, 2, 3].map(|nsid| thresholds.of_namespace(nsid));
        assert_eq!((found, thresholds.smallest()), ([long, short, None], short));
        assert_eq!(SlowIoThresholds::default().smallest(), None);
    }
}
