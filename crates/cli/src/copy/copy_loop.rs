//! Event loop of a copy: sleeps until a device has completions, and checks periodically for a cancel.

use tenmil_base::{Instant, Span, WakeSource};
use tenmil_linux::Clock;
use tenmil_linux::event_loop::{EventLoop, NextStep, run_event_loop};
use tenmil_linux::wakeup::Sleeper;

use super::byte_channel::CopyChannels;

/// Bounded step of a copy or comparison.
pub(super) trait CopyOrComparison {
    /// Submits and completes requests. Returns whether anything was done.
    fn advance(&mut self, now: Instant) -> bool;
    /// Stops submitting new work.
    fn stop_submitting(&mut self);
    /// Whether all work is done and nothing is in flight.
    fn is_finished(&self) -> bool;
    /// Bytes processed, and bytes in total.
    fn done_and_total_bytes(&self) -> (u64, u64);
    /// Channels of both devices.
    fn channels(&mut self) -> &mut CopyChannels;
}

/// Progress callback, called in every iteration of the loop; returning false cancels the copy.
pub type CopyProgressFn<'a> = dyn FnMut(Instant, (u64, u64)) -> bool + 'a;

/// Longest sleep, which bounds the delay of a cancel.
const SLEEP_MAX: Span = Span::from_ms(100);

struct CopyLoop<'a, W> {
    task: &'a mut W,
    watch: &'a mut CopyProgressFn<'a>,
}

/// Drives `task` until it ends or the callback cancels it.
pub(super) fn run_copy_task<'a>(
    task: &'a mut impl CopyOrComparison,
    clock: &Clock,
    watch: &'a mut CopyProgressFn<'a>,
) -> Result<(), String> {
    let refuse = |error: std::io::Error| format!("prepare to sleep: {error}");
    let mut sleeper = Sleeper::new().map_err(refuse)?;
    let sides = task.channels();
    for (side, token) in [(&mut sides.source, 0), (&mut sides.target, 1)] {
        if let WakeSource::Descriptor(descriptor) = side.channel().wake_source() {
            sleeper.sources().add_source(descriptor, token).map_err(refuse)?;
        }
    }
    run_event_loop(&mut CopyLoop { task, watch }, clock, &mut sleeper);
    Ok(())
}

impl<W: CopyOrComparison> EventLoop for CopyLoop<'_, W> {
    fn iterate(&mut self, now: Instant) -> NextStep {
        let worked = self.task.advance(now);
        if !(self.watch)(now, self.task.done_and_total_bytes()) {
            self.task.stop_submitting();
        }
        if self.task.is_finished() {
            NextStep::Exit
        } else if worked {
            NextStep::Again
        } else {
            NextStep::SleepUntil(self.task.channels().wake_at().min(now.after(SLEEP_MAX)))
        }
    }

    fn arm(&mut self, _now: Instant) -> bool {
        self.task.channels().arm()
    }

    fn disarm(&mut self, _ready: &[u64]) {
        self.task.channels().disarm();
    }
}
