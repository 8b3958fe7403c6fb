//! Reporting that a file has lost writes, whoever has it open.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use host::{Errno, Thread};

/// Writes that were answered and that the kernel could not bring to stable storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostWrite {
    /// The file or block device.
    pub path: PathBuf,
    /// What the kernel answered to a flush or a forced write.
    pub error: String,
}

/// Whether writes of a file are lost: set by the first failure, for as long as the file is open.
///
/// The kernel reports a failed writeback once and marks the pages clean, so the next fdatasync
/// succeeds although the data are gone. What it said once stays true here until the owner opens the
/// file anew, which acknowledges it.
#[derive(Debug, Default)]
pub(super) struct LostWrites(AtomicBool);

type Hearer = Box<dyn Fn(&LostWrite) + Send>;

static HEARERS: Mutex<Vec<Hearer>> = Mutex::new(Vec::new());

/// Has `hear` be called when a file that this process has open loses writes: once for each time it was
/// opened, on a thread of its own. For as long as the process lives.
pub fn hear_of_lost_writes(hear: impl Fn(&LostWrite) + Send + 'static) {
    HEARERS.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(hear));
}

impl LostWrites {
    /// Whether there are some. A flag by itself: the kernel reports a loss to each channel, so no
    /// channel depends on another's store being seen in time.
    #[inline]
    pub(super) fn are_known(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Notes a loss; the first one is reported.
    #[cold]
    pub(super) fn note(&self, path: &Path, errno: Errno) {
        if self.0.swap(true, Ordering::Relaxed) {
            return;
        }
        let lost = LostWrite { path: path.into(), error: errno.to_string() };
        // Whoever hears of it may wait, and a channel must not.
        let tell = move |_: &host::Stop| {
            let hearers = HEARERS.lock().unwrap_or_else(PoisonError::into_inner);
            hearers.iter().for_each(|hear| hear(&lost));
        };
        if let Ok(thread) = Thread::spawn("lost-write", None, tell) {
            // It ends by itself, and nobody waits for it.
            std::mem::forget(thread);
        }
    }
}

impl fmt::Display for LostWrite {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, error } = self;
        write!(
            out,
            "flush {}: {error}; answered writes may be lost, so every flush and forced write fails \
             until it is opened anew",
            path.display()
        )
    }
}

/// Whether a forced write that failed may have been told that earlier writes were lost. Not if the
/// kernel refuses it before it begins, nor if a direct one finds the file system full: that is about
/// its own blocks.
pub(super) fn is_loss(errno: Errno, is_direct: bool) -> bool {
    match errno {
        Errno::FAULT | Errno::INVAL | Errno::FBIG | Errno::NOMEM => false,
        Errno::NOSPC | Errno::DQUOT => !is_direct,
        _ => true,
    }
}
