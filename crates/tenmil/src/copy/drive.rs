//! The loop around a copy: it sleeps until one of the devices has something, and looks now and then
//! whether somebody wants it to end.

use base::{Instant, Span, WakeSource};
use host::Clock;
use host::bell::Sleeper;
use host::turn::{Turn, Wait, run};

use super::side::Sides;

/// Work on two sides, a bounded piece at a time.
pub(super) trait Work {
    /// Does what there is to do. Says whether there was anything.
    fn step(&mut self, now: Instant) -> bool;
    /// Begin nothing new.
    fn stop(&mut self);
    /// Whether nothing is left to do, and nothing in flight.
    fn is_over(&self) -> bool;
    /// How many bytes of how many have been dealt with.
    fn progress(&self) -> (u64, u64);
    /// Both sides.
    fn sides(&mut self) -> &mut Sides;
}

/// Told how far the work is, as often as the loop turns; false if it is to end.
pub type Watch<'a> = dyn FnMut(Instant, (u64, u64)) -> bool + 'a;

/// How long it sleeps at most: so soon is it seen that somebody wants it to end.
const LOOK_AROUND: Span = Span::from_ms(100);

struct Driver<'a, W> {
    work: &'a mut W,
    watch: &'a mut Watch<'a>,
}

/// Does all of `work`, or as much as the watcher lets it.
pub(super) fn drive<'a>(
    work: &'a mut impl Work,
    clock: &Clock,
    watch: &'a mut Watch<'a>,
) -> Result<(), String> {
    let refuse = |error: std::io::Error| format!("prepare to sleep: {error}");
    let mut sleeper = Sleeper::new().map_err(refuse)?;
    let sides = work.sides();
    for (side, token) in [(&mut sides.source, 0), (&mut sides.target, 1)] {
        if let WakeSource::Descriptor(descriptor) = side.channel().wake_source() {
            sleeper.sources().add(descriptor, token).map_err(refuse)?;
        }
    }
    run(&mut Driver { work, watch }, clock, &mut sleeper);
    Ok(())
}

impl<W: Work> Turn for Driver<'_, W> {
    fn turn(&mut self, now: Instant) -> Wait {
        let worked = self.work.step(now);
        if !(self.watch)(now, self.work.progress()) {
            self.work.stop();
        }
        if self.work.is_over() {
            Wait::Ended
        } else if worked {
            Wait::Again
        } else {
            Wait::Until(self.work.sides().wake_at().min(now.after(LOOK_AROUND)))
        }
    }

    fn arm(&mut self, _now: Instant) -> bool {
        self.work.sides().arm()
    }

    fn woken(&mut self, _ready: &[u64]) {
        self.work.sides().disarm();
    }
}
