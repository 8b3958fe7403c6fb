//! Times of the stages of a connection's commands, while there is a threshold for slow ones.
//!
//! Without a threshold there is no tracker, and the I/O path checks that once per batch.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tenmil_base::{Instant, Span, UtcTime};
use tenmil_wire::{IoOpcode, Status};

use super::{CommandState, CommandTable, DataDirection};
use crate::slow_io::{SlowIo, SlowIoLog, SlowIoSource, SlowIoStages, SlowIoThresholds};

/// Tracker of the commands of a connection.
#[derive(Debug)]
pub(in crate::tcp) struct SlowIoTracker {
    thresholds: SlowIoThresholds,
    smallest: Span,
    source: Arc<SlowIoSource>,
    log: SlowIoLog,
    /// Number of slow commands of the export.
    count: Arc<AtomicU64>,
    /// By tag.
    times: Vec<CommandTimes>,
    /// Slow commands whose responses are not sent, with their tags.
    unsent: Vec<(u16, SlowIo)>,
}

/// When a command was ready, and when it was submitted; the last one of its tag.
#[derive(Clone, Copy, Debug)]
struct CommandTimes {
    ready_at: Instant,
    submitted_at: Instant,
}

impl SlowIoTracker {
    /// Creates a tracker; `None` if the thresholds select no command.
    pub(in crate::tcp) fn new(
        thresholds: SlowIoThresholds,
        source: SlowIoSource,
        log: SlowIoLog,
        count: Arc<AtomicU64>,
    ) -> Option<Self> {
        let smallest = thresholds.smallest()?;
        let (source, times, unsent) = (Arc::new(source), Vec::new(), Vec::new());
        Some(Self { thresholds, smallest, source, log, count, times, unsent })
    }

    fn times_mut(&mut self, tag: u16) -> &mut CommandTimes {
        let index = usize::from(tag);
        if index >= self.times.len() {
            self.times.resize(index + 1, CommandTimes::UNKNOWN);
        }
        &mut self.times[index]
    }

    fn report(&mut self, at: usize, sent_at: Option<Instant>) {
        let (_, mut command) = self.unsent.swap_remove(at);
        let completed_at = command.received_at.after(command.stages.total());
        command.stages.send = sent_at.map(|sent_at| sent_at.since(completed_at));
        self.log.append(command);
    }
}

impl CommandTimes {
    const UNKNOWN: Self = Self { ready_at: Instant::NEVER, submitted_at: Instant::NEVER };
}

impl CommandTable {
    /// Starts, changes or ends the tracking of slow commands. With the same thresholds, it continues.
    pub(in crate::tcp) fn set_slow_io(&mut self, tracker: Option<SlowIoTracker>) {
        let thresholds = |tracker: &SlowIoTracker| tracker.thresholds.clone();
        if self.slow_io.as_deref().map(thresholds) != tracker.as_ref().map(thresholds) {
            self.slow_io = tracker.map(Box::new);
        }
    }

    /// Whether there is a threshold.
    #[inline]
    pub(in crate::tcp) fn tracks_slow_io(&self) -> bool {
        self.slow_io.is_some()
    }

    /// Records that these commands were ready, and the first ones of them were submitted.
    #[cold]
    pub(in crate::tcp) fn record_submitted(&mut self, now: Instant, ready: &[u16], count: usize) {
        let Some(tracker) = &mut self.slow_io else { return };
        for (at, tag) in ready.iter().enumerate() {
            let received_at = self.slots[usize::from(*tag)].received_at;
            let times = tracker.times_mut(*tag);
            // What is older is of the former command of this tag.
            if times.ready_at == Instant::NEVER || times.ready_at < received_at {
                *times = CommandTimes { ready_at: now, submitted_at: Instant::NEVER };
            }
            if at < count {
                times.submitted_at = now;
            }
        }
    }

    /// Records that the device has completed a command, before the command is completed.
    #[cold]
    pub(in crate::tcp) fn record_device_completion(
        &mut self,
        now: Instant,
        tag: u16,
        status: Status,
    ) {
        let Some(tracker) = &mut self.slow_io else { return };
        let times = std::mem::replace(tracker.times_mut(tag), CommandTimes::UNKNOWN);
        let Some(slot) = self.slots.get(usize::from(tag)) else { return };
        let (command, received_at) = (&slot.command, slot.received_at);
        let took = now.since(received_at);
        if took < tracker.smallest || slot.state != CommandState::Ready {
            return;
        }
        let nsid = command.nsid();
        if tracker.thresholds.of_namespace(nsid).is_none_or(|threshold| took < threshold) {
            return;
        }
        // A command that was submitted before the threshold was set has no times.
        let known = |at: Instant| if at == Instant::NEVER { received_at } else { at };
        let (ready_at, submitted_at) = (known(times.ready_at), known(times.submitted_at));
        let is_write = slot.direction == DataDirection::FromHost;
        let requested_at = if is_write { slot.requested_at.min(ready_at) } else { ready_at };
        let opcode = IoOpcode::from_u8(command.opcode());
        tracker.count.fetch_add(1, Ordering::Relaxed);
        let command = SlowIo {
            source: Arc::clone(&tracker.source),
            operation: opcode.map_or("unknown command", IoOpcode::name),
            namespace: Some(nsid),
            start: opcode.filter(|opcode| has_block(*opcode)).map(|_| command.0[5]),
            len_bytes: slot.len_bytes.into(),
            id: command.cid().into(),
            error: (!status.is_success()).then(|| status.name().to_owned()),
            received_at,
            stages: SlowIoStages {
                wait: requested_at.since(received_at),
                transfer: is_write.then(|| ready_at.since(requested_at)),
                queue: submitted_at.since(ready_at),
                device: now.since(submitted_at),
                send: None,
            },
            ended_at: UtcTime { unix_us: 0 },
        };
        tracker.unsent.push((tag, command));
    }

    /// Whether responses of slow commands are not sent.
    #[inline]
    pub(in crate::tcp) fn has_unsent_slow_io(&self) -> bool {
        self.slow_io.as_ref().is_some_and(|tracker| !tracker.unsent.is_empty())
    }

    /// Reports the slow commands whose responses have been sent.
    #[cold]
    pub(in crate::tcp) fn report_sent_slow_io(&mut self, now: Instant) {
        let Some(tracker) = &mut self.slow_io else { return };
        for at in (0..tracker.unsent.len()).rev() {
            let slot = self.slots.get(usize::from(tracker.unsent[at].0));
            if slot.is_none_or(|slot| !slot.state.has_response()) {
                tracker.report(at, Some(now));
            }
        }
    }
}

impl Drop for SlowIoTracker {
    /// The connection has ended, or the threshold was changed.
    fn drop(&mut self) {
        while !self.unsent.is_empty() {
            self.report(0, None);
        }
    }
}

/// Whether double word 10 and 11 of a command are its first block.
fn has_block(opcode: IoOpcode) -> bool {
    use IoOpcode::{Compare, Read, Verify, Write, WriteUncorrectable, WriteZeroes};
    matches!(opcode, Read | Write | Compare | Verify | WriteUncorrectable | WriteZeroes)
}
