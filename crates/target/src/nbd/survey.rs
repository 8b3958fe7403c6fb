//! What is where, and whether it may be longer: found out off the reactor, since a medium may have to
//! ask its disk.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use base::{Holds, Medium};
use host::pool::{Job, Pool};
use reactor::Handle;
use wire::nbd::{ErrorCode, Extent, ExtentFlags};

use super::exchange::{About, Question};
use super::served::Served;

/// One connection's questions to the pool.
pub(super) struct Survey {
    served: Arc<Served>,
    pool: Arc<Pool>,
    found: Arc<Found>,
    /// Questions that are not answered yet.
    open: usize,
}

/// What has been found out.
#[derive(Default)]
struct Found {
    answers: Mutex<Vec<(u16, Answer)>>,
    count: AtomicUsize,
}

/// What was found out.
pub(super) enum Answer {
    /// What is where: none if nobody knows.
    Extents(Vec<Extent>),
    /// Whether the export has the size that was asked for, or what is told of that, and in words.
    Size(Result<(), (ErrorCode, String)>),
}

impl Survey {
    pub(super) fn new(served: Arc<Served>, pool: Arc<Pool>) -> Self {
        Self { served, pool, found: Arc::default(), open: 0 }
    }

    /// Asks. Rings at `home` when the answer is there.
    pub(super) fn ask(&mut self, question: Question, home: Handle) {
        let (served, found) = (Arc::clone(&self.served), Arc::clone(&self.found));
        let Question { slot, about } = question;
        let job = Job::new("questions", move || {
            found.put(slot, answer(&served, about));
            home.ring();
        });
        self.open += 1;
        if self.pool.submit(job).is_err() {
            self.found.put(slot, when_too_many_ask(about));
        }
    }

    /// Whether an answer waits to be taken.
    #[inline]
    pub(super) fn has_answers(&self) -> bool {
        self.open > 0 && self.found.count.load(Ordering::Acquire) > 0
    }

    /// Takes the answers.
    pub(super) fn take(&mut self) -> Vec<(u16, Answer)> {
        let taken =
            std::mem::take(&mut *self.found.answers.lock().unwrap_or_else(PoisonError::into_inner));
        self.found.count.fetch_sub(taken.len(), Ordering::Relaxed);
        self.open -= taken.len();
        taken
    }
}

impl Found {
    fn put(&self, slot: u16, answer: Answer) {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner).push((slot, answer));
        // Pairs with the acquire in `has_answers`.
        self.count.fetch_add(1, Ordering::Release);
    }
}

fn answer(served: &Served, about: About) -> Answer {
    match about {
        About::Extents { .. } => Answer::Extents(survey(&**served.medium(), about)),
        About::Size { bytes } => {
            let grows = bytes > served.export().size_bytes();
            let error = if grows { ErrorCode::ENOSPC } else { ErrorCode::EIO };
            Answer::Size(served.resize(bytes).map_err(|why| (error, why.to_string())))
        }
    }
}

fn when_too_many_ask(about: About) -> Answer {
    match about {
        // "Request types", NBD_CMD_BLOCK_STATUS: it is always true to call it data.
        About::Extents { len_bytes, .. } => {
            Answer::Extents(vec![Extent { len_bytes, flags: ExtentFlags::NONE }])
        }
        About::Size { .. } => {
            Answer::Size(Err((ErrorCode::ENOMEM, "resize: too many questions wait".to_owned())))
        }
    }
}

/// The extents that a question asks for: neighbours that are alike are one, and the last one is cut
/// where the question ends. None if the medium cannot say.
pub(super) fn survey(medium: &dyn Medium, about: About) -> Vec<Extent> {
    let block_size = u64::from(medium.limits().block_size);
    let About::Extents { offset, len_bytes, extents_max } = about else { return Vec::new() };
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

    use super::{About, survey};

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
        let found = survey(&Striped, About::Extents { offset, len_bytes, extents_max });
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
