//! The loop around a turn: it reads the clock and blocks, so that a turn needs to do neither.

use std::cell::Cell;
use std::num::NonZeroU64;

use base::{Instant, Span};
use rustix::thread::set_current_timer_slack;

use crate::bell::Sleeper;
use crate::clock::Clock;

/// Something that does bounded work when it is called, and says when to be called again.
pub trait Turn {
    /// Does what there is to do at `now`, up to a bound.
    fn turn(&mut self, now: Instant) -> Wait;

    /// Asked after a turn that wants another at once: whether that one wants to know the time. A
    /// reading costs as much as a look for work; who looks often may do with an older one.
    #[inline]
    fn wants_time(&self) -> bool {
        true
    }

    /// Asked when a rest was announced: whether there is something for which whoever brought it
    /// would have rung, had they seen the announcement.
    fn is_wanted(&self) -> bool {
        false
    }

    /// Called when the thread has announced that it will sleep. Makes the sources of work ready to
    /// end a sleep, and looks at all of them once more; true if there is work already.
    fn arm(&mut self, now: Instant) -> bool;

    /// Called after every [`arm`](Self::arm), when the sleep is over or did not take place, with
    /// the tokens of the descriptors that are ready.
    fn woken(&mut self, ready: &[u64]);

    /// Called after a turn that wanted a [`Wait::Look`], with the tokens of the descriptors that are
    /// ready.
    fn heard(&mut self, ready: &[u64]) {
        let _ = ready;
    }
}

/// What a turn wants next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Another turn, at once.
    Again,
    /// Another turn, at once, after a look at which descriptors are ready: for those of them that
    /// nobody asks in a turn.
    Look,
    /// Nothing before this instant, unless a bell rings or a descriptor is ready: it may sleep.
    Until(Instant),
    /// A rest of this length, which only a bell ends early: nothing is armed, no descriptor is
    /// waited for.
    Pause(Span),
    /// Nothing, ever.
    Ended,
}

thread_local! {
    static TURNS: Cell<bool> = const { Cell::new(false) };
}

/// Turns until the turn says that it has ended. Sleeps of this thread end to the nanosecond
/// meanwhile, and not up to 50 us late, as the kernel else allows itself.
pub fn run(turn: &mut (impl Turn + ?Sized), clock: &Clock, sleeper: &mut Sleeper) {
    // If it is refused, sleeps are late, which nothing depends on.
    let _ = set_current_timer_slack(NonZeroU64::new(1));
    TURNS.set(true);
    turn_until_ended(turn, clock, sleeper);
    TURNS.set(false);
    let _ = set_current_timer_slack(None);
}

/// Whether the present thread turns, and so must not wait for anything.
pub fn is_turning() -> bool {
    TURNS.get()
}

fn turn_until_ended(turn: &mut (impl Turn + ?Sized), clock: &Clock, sleeper: &mut Sleeper) {
    let mut ready = Vec::new();
    let mut now = clock.now();
    loop {
        match turn.turn(now) {
            Wait::Again if !turn.wants_time() => continue,
            Wait::Again => {}
            Wait::Look => {
                sleeper.look(&mut ready);
                turn.heard(&ready);
                ready.clear();
            }
            Wait::Pause(span) => {
                let until = now.after(span);
                sleeper.announce_rest();
                if turn.is_wanted() {
                    sleeper.cancel();
                } else {
                    sleeper.rest(until.since(clock.now()));
                }
            }
            Wait::Until(deadline) => {
                sleeper.announce();
                now = clock.now();
                if turn.arm(now) {
                    sleeper.cancel();
                } else {
                    sleeper.block(deadline.since(now), &mut ready);
                }
                turn.woken(&ready);
                ready.clear();
            }
            Wait::Ended => return,
        }
        now = clock.now();
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use base::{Instant, Span};
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::thread::current_timer_slack;

    use super::{Turn, Wait, run};
    use crate::bell::{Bell, Sleeper};
    use crate::mailbox::{Receiver, Sender, mailbox};
    use crate::{Clock, Thread};

    /// Wants what its script says, and notes what was done.
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

    impl<F: FnMut(usize, Instant) -> Wait> Turn for Scripted<F> {
        fn turn(&mut self, now: Instant) -> Wait {
            self.calls.push(Call::Turn);
            self.turns.push(now);
            (self.script)(self.turns.len(), now)
        }

        fn arm(&mut self, now: Instant) -> bool {
            self.calls.push(Call::Arm);
            assert!(Some(&now) >= self.turns.last());
            self.work_when_armed
        }

        fn woken(&mut self, ready: &[u64]) {
            self.calls.push(Call::Woken(ready.to_vec()));
        }
    }

    fn play<F: FnMut(usize, Instant) -> Wait>(sleeper: &mut Sleeper, script: F) -> Scripted<F> {
        play_with(sleeper, script, false)
    }

    fn play_with<F: FnMut(usize, Instant) -> Wait>(
        sleeper: &mut Sleeper,
        script: F,
        work_when_armed: bool,
    ) -> Scripted<F> {
        let mut turn = Scripted { script, turns: Vec::new(), calls: Vec::new(), work_when_armed };
        run(&mut turn, &Clock::start(), sleeper);
        turn
    }

    fn silence() -> Call {
        Call::Woken(Vec::new())
    }

    #[test]
    fn a_turn_that_wants_another_has_it_at_once() {
        let script = |count, _| if count < 4 { Wait::Again } else { Wait::Ended };
        let played = play(&mut Sleeper::new().unwrap(), script);
        assert_eq!(played.calls, [Call::Turn, Call::Turn, Call::Turn, Call::Turn]);
    }

    #[test]
    fn a_deadline_ends_a_sleep_and_a_sleep_is_armed() {
        let span = Span::from_ms(2);
        let script = |count, now: Instant| match count {
            1 => Wait::Until(now.after(span)),
            _ => Wait::Ended,
        };
        let played = play(&mut Sleeper::new().unwrap(), script);
        assert_eq!(played.calls, [Call::Turn, Call::Arm, silence(), Call::Turn]);
        // The clock's rate is known to one part in a thousand, the kernel's deadline is exact.
        let slept = played.turns[1].since(played.turns[0]);
        assert!(slept.ns >= span.ns - span.ns / 500, "{slept}");
    }

    #[test]
    fn a_deadline_that_has_passed_lets_descriptors_speak_all_the_same() {
        let script = |count, _| match count {
            1 => Wait::Until(Instant { ns: 0 }),
            _ => Wait::Ended,
        };
        let mut sleeper = Sleeper::new().unwrap();
        let event: OwnedFd = eventfd(1, EventfdFlags::CLOEXEC).unwrap();
        sleeper.sources().add(&event, 7).unwrap();
        let played = play(&mut sleeper, script);
        assert_eq!(played.calls, [Call::Turn, Call::Arm, Call::Woken(vec![7]), Call::Turn]);
    }

    #[test]
    fn work_that_is_found_when_armed_keeps_it_awake() {
        let script = |count, _| match count {
            1 => Wait::Until(Instant::NEVER),
            _ => Wait::Ended,
        };
        let mut sleeper = Sleeper::new().unwrap();
        let event: OwnedFd = eventfd(1, EventfdFlags::CLOEXEC).unwrap();
        sleeper.sources().add(&event, 7).unwrap();
        let played = play_with(&mut sleeper, script, true);
        assert_eq!(played.calls, [Call::Turn, Call::Arm, silence(), Call::Turn]);
        assert!(!sleeper.block(Span::default(), &mut Vec::new()), "nobody was asked to wake it");
    }

    /// Wants to know the time before every third turn.
    struct Patient(Vec<Instant>);

    impl Turn for Patient {
        fn turn(&mut self, now: Instant) -> Wait {
            self.0.push(now);
            if self.0.len() < 9 { Wait::Again } else { Wait::Ended }
        }

        fn wants_time(&self) -> bool {
            self.0.len().is_multiple_of(3)
        }

        fn arm(&mut self, _: Instant) -> bool {
            false
        }

        fn woken(&mut self, _: &[u64]) {}
    }

    #[test]
    fn the_clock_is_read_only_for_turns_that_want_to_know() {
        let mut patient = Patient(Vec::new());
        run(&mut patient, &Clock::start(), &mut Sleeper::new().unwrap());
        let readings = patient.0.chunk_by(|one, other| one == other).map(<[_]>::len);
        assert_eq!(readings.collect::<Vec<_>>(), [3, 3, 3]);
    }

    #[test]
    fn what_was_ready_once_is_not_told_twice() {
        let event: OwnedFd = eventfd(1, EventfdFlags::CLOEXEC).unwrap();
        let script = |count, now: Instant| match count {
            1 => Wait::Until(Instant::NEVER),
            2 => {
                rustix::io::read(&event, &mut [0; 8]).unwrap();
                Wait::Until(now.after(Span::from_us(10)))
            }
            _ => Wait::Ended,
        };
        let mut sleeper = Sleeper::new().unwrap();
        sleeper.sources().add(&event, 7).unwrap();
        let played = play(&mut sleeper, script);
        let told: Vec<_> =
            played.calls.iter().filter(|call| matches!(call, Call::Woken(_))).collect();
        assert_eq!(told, [&Call::Woken(vec![7]), &silence()]);
    }

    #[test]
    fn a_pause_arms_nothing() {
        let span = Span::from_us(400);
        let script = |count, _| if count == 1 { Wait::Pause(span) } else { Wait::Ended };
        let played = play(&mut Sleeper::new().unwrap(), script);
        assert_eq!(played.calls, [Call::Turn, Call::Turn]);
        let paused = played.turns[1].since(played.turns[0]);
        assert!(paused.ns >= span.ns - span.ns / 500, "{paused}");
    }

    /// Rests once, for long, and has something for which nobody rings if so wanted.
    struct Resting {
        turns: u32,
        is_wanted: bool,
    }

    impl Turn for Resting {
        fn turn(&mut self, _: Instant) -> Wait {
            self.turns += 1;
            if self.turns == 1 { Wait::Pause(Span::from_secs(60)) } else { Wait::Ended }
        }

        fn is_wanted(&self) -> bool {
            self.is_wanted
        }

        fn arm(&mut self, _: Instant) -> bool {
            false
        }

        fn woken(&mut self, _: &[u64]) {}
    }

    #[test]
    fn a_pause_ends_with_a_bell_or_does_not_begin_if_there_is_something_already() {
        let clock = Clock::start();
        let begun = clock.now();
        let mut sleeper = Sleeper::new().unwrap();
        run(&mut Resting { turns: 0, is_wanted: true }, &clock, &mut sleeper);
        let bell = sleeper.bell();
        let rest =
            move |_: &_| run(&mut Resting { turns: 0, is_wanted: false }, &clock, &mut sleeper);
        let thread = Thread::spawn("rests", None, rest).unwrap();
        while !thread.is_finished() {
            bell.ring();
            crate::thread::give_way();
        }
        thread.join();
        assert!(clock.now().since(begun) < Span::from_secs(30), "it was rested for");
    }

    #[test]
    fn the_kernel_is_asked_to_be_exact_while_it_turns_and_only_then() {
        let before = current_timer_slack().unwrap();
        let mut within = 0;
        let script = |_, _| {
            within = current_timer_slack().unwrap();
            Wait::Ended
        };
        play(&mut Sleeper::new().unwrap(), script);
        assert_eq!((within, current_timer_slack().unwrap()), (1, before));
    }

    /// Sends back each number it receives, one higher, and sleeps whenever it has none.
    struct Player {
        from: Receiver<u64>,
        to: Sender<u64>,
        bell: Bell,
        last: u64,
        sleeps: u64,
        give_up: Instant,
    }

    impl Turn for Player {
        fn turn(&mut self, now: Instant) -> Wait {
            assert!(now < self.give_up, "a wake-up was lost after {} sleeps", self.sleeps);
            while let Some(number) = self.from.receive() {
                let sent = self.to.send(number + 1);
                self.bell.ring();
                if number >= self.last {
                    return Wait::Ended;
                }
                sent.unwrap();
            }
            Wait::Until(self.give_up)
        }

        fn arm(&mut self, _now: Instant) -> bool {
            !self.from.is_empty()
        }

        fn woken(&mut self, _ready: &[u64]) {
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
                |from, to, bell| Player { from, to, bell, last: TRIPS - 1, sleeps: 0, give_up };
            let mut first = player(one.1, two.0, there.bell());
            let mut second = player(two.1, one.0, here.bell());
            let turn = move |_: &_| run(&mut second, &clock, &mut there);
            let thread = Thread::spawn("second", None, turn).unwrap();
            run(&mut first, &clock, &mut here);
            thread.join();
            assert!(first.sleeps > 0);
        }
    }
}
