//! What is where: found out off the reactor, since a medium may have to ask its disk.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use base::{Holds, Medium};
use host::pool::{Job, Pool};
use reactor::Handle;
use wire::nbd::{Extent, ExtentFlags};

use super::exchange::Question;

/// One connection's questions to the pool.
pub(super) struct Survey {
    medium: Arc<dyn Medium>,
    pool: Arc<Pool>,
    found: Arc<Found>,
    /// Questions that are not answered yet.
    open: usize,
}

/// What has been found out.
#[derive(Default)]
struct Found {
    answers: Mutex<Vec<(u16, Vec<Extent>)>>,
    count: AtomicUsize,
}

impl Survey {
    pub(super) fn new(medium: Arc<dyn Medium>, pool: Arc<Pool>) -> Self {
        Self { medium, pool, found: Arc::default(), open: 0 }
    }

    /// Asks. Rings at `home` when the answer is there.
    pub(super) fn ask(&mut self, question: Question, home: Handle) {
        let (medium, found) = (Arc::clone(&self.medium), Arc::clone(&self.found));
        let job = Job::new("extents", move || {
            found.put(question.slot, survey(&*medium, &question));
            home.ring();
        });
        self.open += 1;
        if self.pool.submit(job).is_err() {
            // "Request types", NBD_CMD_BLOCK_STATUS: it is always true to call it data.
            let all = Extent { len_bytes: question.len_bytes, flags: ExtentFlags::NONE };
            self.found.put(question.slot, vec![all]);
        }
    }

    /// Whether an answer waits to be taken.
    #[inline]
    pub(super) fn has_answers(&self) -> bool {
        self.open > 0 && self.found.count.load(Ordering::Acquire) > 0
    }

    /// Takes the answers.
    pub(super) fn take(&mut self) -> Vec<(u16, Vec<Extent>)> {
        let taken =
            std::mem::take(&mut *self.found.answers.lock().unwrap_or_else(PoisonError::into_inner));
        self.found.count.fetch_sub(taken.len(), Ordering::Relaxed);
        self.open -= taken.len();
        taken
    }
}

impl Found {
    fn put(&self, slot: u16, extents: Vec<Extent>) {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner).push((slot, extents));
        // Pairs with the acquire in `has_answers`.
        self.count.fetch_add(1, Ordering::Release);
    }
}

/// The extents that a question asks for: neighbours that are alike are one, and the last one is cut
/// where the question ends. None if the medium cannot say.
pub(super) fn survey(medium: &dyn Medium, question: &Question) -> Vec<Extent> {
    let block_size = u64::from(medium.limits().block_size);
    let Question { offset, len_bytes, extents_max, .. } = *question;
    let end = offset + u64::from(len_bytes);
    let mut extents: Vec<Extent> = Vec::new();
    let mut at = offset;
    while at < end {
        let Ok(extent) = medium.extent(at / block_size) else { break };
        // An answer that does not get on would be asked for ever.
        let blocks = extent.blocks.max(1);
        let until = (at / block_size).saturating_add(blocks).saturating_mul(block_size).min(end);
        let len_bytes = u32::try_from(until - at).unwrap_or(u32::MAX);
        let flags = flags(extent.holds);
        let told = extents.len();
        match extents.last_mut() {
            Some(last) if last.flags == flags => last.len_bytes += len_bytes,
            _ if told == extents_max => break,
            _ => extents.push(Extent { len_bytes, flags }),
        }
        at = until;
    }
    extents
}

fn flags(holds: Holds) -> ExtentFlags {
    match holds {
        Holds::Data => ExtentFlags::NONE,
        Holds::Zeroes => ExtentFlags::ZERO,
        Holds::Hole => ExtentFlags::ZERO.and(ExtentFlags::HOLE),
    }
}

#[cfg(test)]
mod tests {
    use base::{Backend, Extent, Holds, Limits, Medium};
    use block::Null;

    use super::{Question, survey};

    /// Blocks of 512 bytes: a hole of four, data of two, zeroes of two in pieces of one, and so on.
    struct Striped;

    impl Medium for Striped {
        fn limits(&self) -> Limits {
            Null::new(512, 64).unwrap().limits()
        }

        fn channel(&self) -> Result<Box<dyn Backend>, String> {
            Err("nobody asks".into())
        }

        fn extent(&self, lba: u64) -> Result<Extent, String> {
            match lba % 8 {
                at @ 0..4 => Ok(Extent { blocks: 4 - at, holds: Holds::Hole }),
                at @ 4..6 => Ok(Extent { blocks: 6 - at, holds: Holds::Data }),
                _ => Ok(Extent { blocks: 1, holds: Holds::Zeroes }),
            }
        }
    }

    fn surveyed(offset: u64, len_bytes: u32, extents_max: usize) -> Vec<(u32, u32)> {
        let question = Question { slot: 0, offset, len_bytes, extents_max };
        let found = survey(&Striped, &question);
        found.iter().map(|extent| (extent.len_bytes, extent.flags.0)).collect()
    }

    #[test]
    fn extents_are_joined_cut_and_counted() {
        assert_eq!(surveyed(0, 4096, 10), [(2048, 3), (1024, 0), (1024, 2)]);
        assert_eq!(surveyed(0, 4096, 1), [(2048, 3)]);
        assert_eq!(surveyed(100, 200, 10), [(200, 3)]);
        assert_eq!(surveyed(1900, 1000, 10), [(148, 3), (852, 0)]);
        assert_eq!(surveyed(0, 8192, 5).len(), 5);
    }
}
