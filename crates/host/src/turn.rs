//! The loop around a turn: it reads the clock and blocks, so that a turn needs to do neither.

use base::{Instant, Span};

use crate::bell::Sleeper;
use crate::clock::Clock;
use crate::thread::rest;

/// Something that does bounded work when it is called, and says when to be called again.
pub trait Turn {
    /// Does what there is to do at `now`, up to a bound.
    fn turn(&mut self, now: Instant) -> Wait;

    /// Called when the thread has announced that it will sleep. Makes the sources of work ready to
    /// end a sleep, and looks at all of them once more; true if there is work already.
    fn arm(&mut self, now: Instant) -> bool;

    /// Called after every [`arm`](Self::arm), when the sleep is over or did not take place, with
    /// the tokens of the descriptors that are ready.
    fn woken(&mut self, ready: &[u64]);
}

/// What a turn wants next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Another turn, at once.
    Again,
    /// Nothing before this instant, unless a bell rings or a descriptor is ready: it may sleep.
    Until(Instant),
    /// A rest of this length that nothing ends early.
    Pause(Span),
    /// Nothing, ever.
    Ended,
}

/// Turns until the turn says that it has ended.
pub fn run(turn: &mut (impl Turn + ?Sized), clock: &Clock, sleeper: &mut Sleeper) {
    let mut ready = Vec::new();
    loop {
        match turn.turn(clock.now()) {
            Wait::Again => {}
            Wait::Pause(span) => rest(span),
            Wait::Until(deadline) => {
                sleeper.announce();
                let now = clock.now();
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
    }
}
