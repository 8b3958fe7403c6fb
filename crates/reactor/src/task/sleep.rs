//! Timers of tasks.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use tenmil_base::{Instant, Span};

use super::executor_shared::ExecutorShared;
use super::join_handle::JoinError;

/// Future that completes when its time has passed on the executor's clock, or fails when the
/// executor is gone. The time starts with the iteration in which it is first polled.
#[must_use = "a future does nothing unless it is awaited"]
pub struct Sleep {
    shared: Arc<ExecutorShared>,
    span: Span,
    /// Timer number, after the first poll.
    timer: Option<u64>,
}

/// Timers of one executor.
#[derive(Default)]
pub(super) struct SleepTimers {
    next_number: u64,
    waiting: BTreeMap<u64, SleepTimer>,
    /// Timers with a known due time.
    due: BTreeSet<(Instant, u64)>,
    /// Timers whose due time the executor must set.
    unset: Vec<(u64, Span)>,
    is_closed: bool,
}

struct SleepTimer {
    waker: Waker,
    at: Option<Instant>,
}

impl Sleep {
    pub(super) fn new(shared: &Arc<ExecutorShared>, span: Span) -> Self {
        Self { shared: Arc::clone(shared), span, timer: None }
    }
}

impl Future for Sleep {
    type Output = Result<(), JoinError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut alarms = self.shared.lock_timers();
        if alarms.is_closed {
            return Poll::Ready(Err(JoinError::Gone));
        }
        if let Some(number) = self.timer {
            let Some(alarm) = alarms.waiting.get_mut(&number) else { return Poll::Ready(Ok(())) };
            if !alarm.waker.will_wake(context.waker()) {
                let old = std::mem::replace(&mut alarm.waker, context.waker().clone());
                // Dropping a waker may run arbitrary code: not under the lock.
                drop(alarms);
                drop(old);
            }
            return Poll::Pending;
        }
        let number = alarms.add_timer(self.span, context.waker());
        drop(alarms);
        self.shared.set_new_timer_flag();
        self.timer = Some(number);
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(number) = self.timer {
            let waker = self.shared.lock_timers().remove_timer(number);
            drop(waker);
        }
    }
}

impl SleepTimers {
    fn add_timer(&mut self, span: Span, waker: &Waker) -> u64 {
        let number = self.next_number;
        self.next_number += 1;
        self.waiting.insert(number, SleepTimer { waker: waker.clone(), at: None });
        self.unset.push((number, span));
        number
    }

    fn remove_timer(&mut self, number: u64) -> Option<Waker> {
        let SleepTimer { waker, at } = self.waiting.remove(&number)?;
        match at {
            Some(at) => drop(self.due.remove(&(at, number))),
            None => self.unset.retain(|(unset, _)| *unset != number),
        }
        Some(waker)
    }

    /// Sets unset due times, counted from `now`. Returns the earliest due time.
    pub(super) fn set_new_timers(&mut self, now: Instant) -> Instant {
        for (number, span) in self.unset.drain(..) {
            let at = now.after(span);
            if let Some(alarm) = self.waiting.get_mut(&number) {
                alarm.at = Some(at);
                self.due.insert((at, number));
            }
        }
        self.earliest_deadline()
    }

    /// Earliest due time.
    pub(super) fn earliest_deadline(&self) -> Instant {
        self.due.first().map_or(Instant::NEVER, |(at, _)| *at)
    }

    /// Takes the waker of a due timer.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<Waker> {
        let (_, number) = self.due.first().filter(|(at, _)| *at <= now).copied()?;
        self.due.pop_first();
        self.waiting.remove(&number).map(|alarm| alarm.waker)
    }

    /// Closes the timers. Returns the wakers to be called.
    pub(super) fn wake_all(&mut self) -> Vec<Waker> {
        self.is_closed = true;
        self.due.clear();
        self.unset.clear();
        std::mem::take(&mut self.waiting).into_values().map(|alarm| alarm.waker).collect()
    }
}

impl fmt::Debug for Sleep {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Sleep").field("span", &self.span).finish_non_exhaustive()
    }
}
