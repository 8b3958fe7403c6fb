//! What the queues of one controller share: a lock for fused pairs, and how writes are to be made.
//!
//! A compare-and-write must look atomic to every other command (NVM 1.1 §2.1.3, §2.1.4). The queue that has
//! such a pair asks for the controller; the others see it with one load per turn, take no new
//! commands, and say when nothing of theirs is running:
//!
//! ```text
//!   queue A   claim ──────────── all quiet? ─────────── compare, write ── release
//!   queue B          sees the claim, finishes ── quiet                          goes on
//! ```
//!
//! This makes the pair atomic among the queues of one controller, whichever threads they live on.
//! Two controllers over one medium do not see each other's claims.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Shared by the queues of one controller.
#[derive(Debug)]
pub struct Siblings {
    /// `round << 16 | queue` of the queue that claims the controller; a queue of zero means none.
    claim: AtomicU64,
    /// The volatile write cache is switched off (feature 06h): every write is forced.
    is_write_through: AtomicBool,
    /// For each queue, the claim under which it is quiet, or [`ABSENT`].
    quiet: Box<[AtomicU64]>,
}

/// The queue does not exist, so nobody has to wait for it.
const ABSENT: u64 = u64::MAX;
const QUEUE: u64 = 0xffff;

impl Siblings {
    /// For queues 1 to `queues`.
    pub fn new(queues: u16) -> Arc<Self> {
        Arc::new(Self {
            claim: AtomicU64::new(0),
            is_write_through: AtomicBool::new(false),
            quiet: (0..=queues).map(|_| AtomicU64::new(ABSENT)).collect(),
        })
    }

    /// Switches forced writes on or off.
    pub fn set_write_through(&self, is_write_through: bool) {
        self.is_write_through.store(is_write_through, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn is_write_through(&self) -> bool {
        self.is_write_through.load(Ordering::Relaxed)
    }

    /// A queue comes into being: from now on it is waited for.
    pub(super) fn join(&self, queue: u16) {
        self.tell(queue, 0);
    }

    /// A queue is gone, with its claim.
    pub(super) fn leave(&self, queue: u16) {
        self.release(queue);
        self.tell(queue, ABSENT);
    }

    /// Whether another queue claims the controller. If so and `is_quiet`, it is told.
    #[inline]
    pub(super) fn is_claimed_by_other(&self, queue: u16, is_quiet: bool) -> bool {
        let claim = self.claim.load(Ordering::Acquire);
        claim & QUEUE != 0 && self.other(claim, queue, is_quiet)
    }

    #[cold]
    fn other(&self, claim: u64, queue: u16, is_quiet: bool) -> bool {
        let is_other = claim & QUEUE != u64::from(queue);
        if is_other && is_quiet {
            // Release: what this queue has done is done when the claimer sees it.
            self.tell(queue, claim);
        }
        is_other
    }

    /// Claims the controller, or finds out whether everybody else is quiet. True means that the
    /// pair may run.
    pub(super) fn claim(&self, queue: u16) -> bool {
        let seen = self.claim.load(Ordering::Acquire);
        let claim = match seen & QUEUE {
            0 => {
                let mine = (seen & !QUEUE).wrapping_add(QUEUE + 1) | u64::from(queue);
                let won =
                    self.claim.compare_exchange(seen, mine, Ordering::AcqRel, Ordering::Relaxed);
                if won.is_err() {
                    return false;
                }
                mine
            }
            owner if owner == u64::from(queue) => seen,
            _ => return false,
        };
        (1..).zip(self.quiet.iter().skip(1)).all(|(other, quiet): (u16, _)| {
            let told = quiet.load(Ordering::Acquire);
            other == queue || told == ABSENT || told == claim
        })
    }

    /// Gives the controller back, if this queue has claimed it.
    pub(super) fn release(&self, queue: u16) {
        let seen = self.claim.load(Ordering::Acquire);
        if seen & QUEUE == u64::from(queue) {
            // The round stays, so that nobody's old word of being quiet counts for the next claim.
            self.claim.store(seen & !QUEUE, Ordering::Release);
        }
    }

    fn tell(&self, queue: u16, word: u64) {
        if let Some(place) = self.quiet.get(usize::from(queue)) {
            place.store(word, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Siblings;

    #[test]
    fn a_claim_is_granted_when_all_others_are_quiet_and_not_before() {
        let siblings = Siblings::new(3);
        for queue in [1, 2, 3] {
            siblings.join(queue);
        }
        assert!(!siblings.claim(1), "two others run");
        assert!(!siblings.is_claimed_by_other(1, true), "one's own claim stops nobody");
        assert!(siblings.is_claimed_by_other(2, false), "busy");
        assert!(!siblings.claim(1));
        assert!(siblings.is_claimed_by_other(2, true));
        assert!(!siblings.claim(1), "the third still runs");
        assert!(!siblings.claim(2), "one claim at a time");
        siblings.leave(3);
        assert!(siblings.claim(1));
        siblings.release(1);
        assert!(!siblings.is_claimed_by_other(2, true));
        assert!(!siblings.claim(1), "an old word does not count for a new claim");
        siblings.leave(1);
        assert!(!siblings.is_claimed_by_other(2, true), "a queue that is gone claims nothing");
    }
}
