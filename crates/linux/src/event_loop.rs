//! Loop of a polling thread: reads the clock and blocks, so that an iteration does neither.

use std::cell::Cell;
use std::num::NonZeroU64;

use rustix::thread::set_current_timer_slack;
use tenmil_base::{Instant, Span};

use crate::clock::Clock;
use crate::wakeup::Sleeper;

/// Bounded work that is called repeatedly and returns when it is to be called again.
pub trait EventLoop {
    /// Performs the work due at `now`, up to a bound.
    fn iterate(&mut self, now: Instant) -> NextStep;

    /// Whether the next immediate iteration needs a fresh clock reading. A reading costs as much as
    /// a poll, so frequent polls may use an older one.
    #[inline]
    fn needs_clock(&self) -> bool {
        true
    }

    /// Whether work arrived before a pause was announced whose sender would have notified had it
    /// seen the announcement. Called after the announcement.
    fn has_unnotified_work(&self) -> bool {
        false
    }

    /// Arms the sources of work to end a sleep, and checks all of them once more; true if there is
    /// work. Called after the thread has announced its sleep.
    fn arm(&mut self, now: Instant) -> bool;

    /// Handles the end of a sleep, or its omission, with the tokens of ready descriptors. Called
    /// after every [`arm`](Self::arm).
    fn disarm(&mut self, ready: &[u64]);

    /// Handles the tokens of ready descriptors, after an iteration that returned
    /// [`NextStep::PollDescriptors`].
    fn handle_ready(&mut self, ready: &[u64]) {
        let _ = ready;
    }
}

/// Result of an iteration: when the next one is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextStep {
    /// Iterate again at once.
    Again,
    /// Poll for ready descriptors, then iterate again at once: for descriptors that no poller
    /// polls.
    PollDescriptors,
    /// Idle until this instant, a notification or a ready descriptor: the thread may sleep.
    SleepUntil(Instant),
    /// Pause for this long; only a notification ends it early. Nothing is armed and no descriptor
    /// is waited for.
    Pause(Span),
    /// The loop ends.
    Exit,
}

thread_local! {
    static IN_LOOP: Cell<bool> = const { Cell::new(false) };
}

/// Iterates until [`NextStep::Exit`]. Sets the thread's timer slack to 1 ns, so that sleeps are not
/// up to 50 us late.
pub fn run_event_loop(turn: &mut (impl EventLoop + ?Sized), clock: &Clock, sleeper: &mut Sleeper) {
    // If refused, sleeps end late, on which nothing depends.
    let _ = set_current_timer_slack(NonZeroU64::new(1));
    IN_LOOP.set(true);
    run_until_exit(turn, clock, sleeper);
    IN_LOOP.set(false);
    let _ = set_current_timer_slack(None);
}

/// Whether the current thread runs an event loop and must not block.
pub fn is_in_event_loop() -> bool {
    IN_LOOP.get()
}

fn run_until_exit(turn: &mut (impl EventLoop + ?Sized), clock: &Clock, sleeper: &mut Sleeper) {
    let mut ready = Vec::new();
    let mut now = clock.now();
    loop {
        match turn.iterate(now) {
            NextStep::Again if !turn.needs_clock() => continue,
            NextStep::Again => {}
            NextStep::PollDescriptors => {
                sleeper.poll_ready(&mut ready);
                turn.handle_ready(&ready);
                ready.clear();
            }
            NextStep::Pause(span) => {
                let until = now.after(span);
                sleeper.announce_sleep_without_descriptors();
                // Work that arrived before the announcement was not notified: check for it now.
                if turn.has_unnotified_work() {
                    sleeper.cancel_sleep();
                } else {
                    sleeper.sleep_without_descriptors(until.since(clock.now()));
                }
            }
            NextStep::SleepUntil(deadline) => {
                sleeper.announce_sleep();
                now = clock.now();
                // The announcement precedes the final check in `arm`, so no wake-up is lost.
                if turn.arm(now) {
                    sleeper.cancel_sleep();
                } else {
                    sleeper.sleep_until_ready(deadline.since(now), &mut ready);
                }
                turn.disarm(&ready);
                ready.clear();
            }
            NextStep::Exit => return,
        }
        now = clock.now();
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::thread::current_timer_slack;
    use tenmil_base::{Instant, Span};

    use super::{EventLoop, NextStep, run_event_loop};
    use crate::mailbox::{Receiver, Sender, mailbox};
    use crate::wakeup::{Notifier, Sleeper};
    use crate::{Clock, NamedThread};

    /// Returns its scripted steps, and records its calls.
    struct Scripted<F> {
        script: F,
        turns: Vec<Instant>,
        calls: Vec<Call>,
        work_when_armed: bool,
    }

    #[derive(Debug, PartialEq)]
    enum Call {
        Turn,
        Arm,
        Woken(Vec<u64>),
    }

    impl<F: FnMut(usize, Instant) -> NextStep> EventLoop for Scripted<F> {
        fn iterate(&mut self, now: Instant) -> NextStep {
            self.calls.push(Call::Turn);
            self.turns.push(now);
            (self.script)(self.turns.len(), now)
        }

        fn arm(&mut self, now: Instant) -> bool {
            self.calls.push(Call::Arm);
            assert!(Some(&now) >= self.turns.last());
            self.work_when_armed
        }

        fn disarm(&mut self, ready: &[u64]) {
            self.calls.push(Call::Woken(ready.to_vec()));
        }
    }

    fn run_scripted_loop<F: FnMut(usize, Instant) -> NextStep>(
        sleeper: &mut Sleeper,
        script: F,
    ) -> Scripted<F> {
        run_scripted_loop_with_work(sleeper, script, false)
    }

    fn run_scripted_loop_with_work<F: FnMut(usize, Instant) -> NextStep>(
        sleeper: &mut Sleeper,
        script: F,
        work_when_armed: bool,
    ) -> Scripted<F> {
        let mut turn = Scripted { script, turns: Vec::new(), calls: Vec::new(), work_when_armed };
        run_event_loop(&mut turn, &Clock::start(), sleeper);
        turn
    }

    fn woken_without_events() -> Call {
        Call::Woken(Vec::new())
    }

    #[test]
    fn iteration_that_requests_another_gets_it_at_once() {
        let script = |count, _| if count < 4 { NextStep::Again } else { NextStep::Exit };
        let played = run_scripted_loop(&mut Sleeper::new().unwrap(), script);
        assert_eq!(played.calls, [Call::Turn, Call::Turn, Call::Turn, Call::Turn]);
    }

    #[test]
    fn deadline_ends_a_sleep_and_every_sleep_is_armed() {
        let span = Span::from_ms(2);
        let script = |count, now: Instant| match count {
            1 => NextStep::SleepUntil(now.after(span)),
            _ => NextStep::Exit,
        };
        let played = run_scripted_loop(&mut Sleeper::new().unwrap(), script);
        assert_eq!(played.calls, [Call::Turn, Call::Arm, woken_without_events(), Call::Turn]);
        // The clock's rate is known to one part in a thousand; the kernel's deadline is exact.
        let slept = played.turns[1].since(played.turns[0]);
        assert!(slept.ns >= span.ns - span.ns / 500, "{slept}");
    }

    #[test]
    fn passed_deadline_still_polls_descriptors() {
        let script = |count, _| match count {
            1 => NextStep::SleepUntil(Instant { ns: 0 }),
            _ => NextStep::Exit,
        };
        let mut sleeper = Sleeper::new().unwrap();
        let event: OwnedFd = eventfd(1, EventfdFlags::CLOEXEC).unwrap();
        sleeper.sources().add_source(&event, 7).unwrap();
        let played = run_scripted_loop(&mut sleeper, script);
        assert_eq!(played.calls, [Call::Turn, Call::Arm, Call::Woken(vec![7]), Call::Turn]);
    }

    #[test]
    fn work_found_while_arming_prevents_the_sleep() {
        let script = |count, _| match count {
            1 => NextStep::SleepUntil(Instant::NEVER),
            _ => NextStep::Exit,
        };
        let mut sleeper = Sleeper::new().unwrap();
        let event: OwnedFd = eventfd(1, EventfdFlags::CLOEXEC).unwrap();
        sleeper.sources().add_source(&event, 7).unwrap();
        let played = run_scripted_loop_with_work(&mut sleeper, script, true);
        assert_eq!(played.calls, [Call::Turn, Call::Arm, woken_without_events(), Call::Turn]);
        assert!(
            !sleeper.sleep_until_ready(Span::default(), &mut Vec::new()),
            "no wake-up was requested"
        );
    }

    /// Requests a clock reading before every third iteration.
    struct Patient(Vec<Instant>);

    impl EventLoop for Patient {
        fn iterate(&mut self, now: Instant) -> NextStep {
            self.0.push(now);
            if self.0.len() < 9 { NextStep::Again } else { NextStep::Exit }
        }

        fn needs_clock(&self) -> bool {
            self.0.len().is_multiple_of(3)
        }

        fn arm(&mut self, _: Instant) -> bool {
            false
        }

        fn disarm(&mut self, _: &[u64]) {}
    }

    #[test]
    fn clock_is_read_only_for_iterations_that_need_it() {
        let mut patient = Patient(Vec::new());
        run_event_loop(&mut patient, &Clock::start(), &mut Sleeper::new().unwrap());
        let readings = patient.0.chunk_by(|one, other| one == other).map(<[_]>::len);
        assert_eq!(readings.collect::<Vec<_>>(), [3, 3, 3]);
    }

    #[test]
    fn ready_descriptor_is_reported_once() {
        let event: OwnedFd = eventfd(1, EventfdFlags::CLOEXEC).unwrap();
        let script = |count, now: Instant| match count {
            1 => NextStep::SleepUntil(Instant::NEVER),
            2 => {
                rustix::io::read(&event, &mut [0; 8]).unwrap();
                NextStep::SleepUntil(now.after(Span::from_us(10)))
            }
            _ => NextStep::Exit,
        };
        let mut sleeper = Sleeper::new().unwrap();
        sleeper.sources().add_source(&event, 7).unwrap();
        let played = run_scripted_loop(&mut sleeper, script);
        let reported: Vec<_> =
            played.calls.iter().filter(|call| matches!(call, Call::Woken(_))).collect();
        assert_eq!(reported, [&Call::Woken(vec![7]), &woken_without_events()]);
    }

    #[test]
    fn pause_arms_no_descriptors() {
        let span = Span::from_us(400);
        let script = |count, _| if count == 1 { NextStep::Pause(span) } else { NextStep::Exit };
        let played = run_scripted_loop(&mut Sleeper::new().unwrap(), script);
        assert_eq!(played.calls, [Call::Turn, Call::Turn]);
        let paused = played.turns[1].since(played.turns[0]);
        assert!(paused.ns >= span.ns - span.ns / 500, "{paused}");
    }

    /// Pauses once, for long, with unnotified work if requested.
    struct PausingLoop {
        turns: u32,
        is_wanted: bool,
    }

    impl EventLoop for PausingLoop {
        fn iterate(&mut self, _: Instant) -> NextStep {
            self.turns += 1;
            if self.turns == 1 { NextStep::Pause(Span::from_secs(60)) } else { NextStep::Exit }
        }

        fn has_unnotified_work(&self) -> bool {
            self.is_wanted
        }

        fn arm(&mut self, _: Instant) -> bool {
            false
        }

        fn disarm(&mut self, _: &[u64]) {}
    }

    #[test]
    fn pause_ends_with_a_notification_or_is_skipped_if_work_is_pending() {
        let clock = Clock::start();
        let begun = clock.now();
        let mut sleeper = Sleeper::new().unwrap();
        run_event_loop(&mut PausingLoop { turns: 0, is_wanted: true }, &clock, &mut sleeper);
        let waker = sleeper.notifier();
        let rest = move |_: &_| {
            run_event_loop(&mut PausingLoop { turns: 0, is_wanted: false }, &clock, &mut sleeper)
        };
        let thread = NamedThread::spawn("rests", None, rest).unwrap();
        while !thread.is_finished() {
            waker.notify();
            crate::named_thread::yield_cpu();
        }
        thread.join();
        assert!(clock.now().since(begun) < Span::from_secs(30), "it was rested for");
    }

    #[test]
    fn timer_slack_is_minimal_only_inside_the_loop() {
        let before = current_timer_slack().unwrap();
        let mut within = 0;
        let script = |_, _| {
            within = current_timer_slack().unwrap();
            NextStep::Exit
        };
        run_scripted_loop(&mut Sleeper::new().unwrap(), script);
        assert_eq!((within, current_timer_slack().unwrap()), (1, before));
    }

    /// Returns each number it receives, incremented, and sleeps whenever it has none.
    struct Player {
        from: Receiver<u64>,
        to: Sender<u64>,
        waker: Notifier,
        last: u64,
        sleeps: u64,
        give_up: Instant,
    }

    impl EventLoop for Player {
        fn iterate(&mut self, now: Instant) -> NextStep {
            assert!(now < self.give_up, "a wake-up was lost after {} sleeps", self.sleeps);
            while let Some(number) = self.from.receive() {
                let sent = self.to.send(number + 1);
                self.waker.notify();
                if number >= self.last {
                    return NextStep::Exit;
                }
                sent.unwrap();
            }
            NextStep::SleepUntil(self.give_up)
        }

        fn arm(&mut self, _now: Instant) -> bool {
            !self.from.is_empty()
        }

        fn disarm(&mut self, _ready: &[u64]) {
            self.sleeps += 1;
        }
    }

    #[test]
    fn two_threads_that_sleep_between_messages_miss_none() {
        const TRIPS: u64 = 10_000;
        let clock = Clock::start();
        let give_up = clock.now().after(Span::from_secs(60));
        for make in [Sleeper::new, Sleeper::with_fences] {
            let (mut here, mut there) = (make().unwrap(), make().unwrap());
            let [one, two] = [mailbox(4), mailbox(4)];
            one.0.send(0).unwrap();
            let player =
                |from, to, waker| Player { from, to, waker, last: TRIPS - 1, sleeps: 0, give_up };
            let mut first = player(one.1, two.0, there.notifier());
            let mut second = player(two.1, one.0, here.notifier());
            let turn = move |_: &_| run_event_loop(&mut second, &clock, &mut there);
            let thread = NamedThread::spawn("second", None, turn).unwrap();
            run_event_loop(&mut first, &clock, &mut here);
            thread.join();
            assert!(first.sleeps > 0);
        }
    }
}
