//! Detection and reporting of lost writes of a file.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use tenmil_linux::storage_file::BufferedReason;
use tenmil_linux::{Errno, NamedThread};

/// Completed writes that the kernel could not bring to stable storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostWrite {
    /// The file or block device.
    pub path: PathBuf,
    /// The kernel error of the flush or FUA write.
    pub error: String,
}

/// How often writes of a file were lost, as reported by flushes and forced writes, and how many of
/// these losses an owner has acknowledged.
///
/// The kernel reports a failed writeback once and marks the pages clean, so the next fdatasync
/// succeeds although the data are gone. What it said once stays true here for each channel until the
/// channel's owner has acknowledged it, or the file is opened anew.
#[derive(Debug, Default)]
pub(super) struct LostWriteCounts {
    noted: AtomicU64,
    acknowledged_count: AtomicU64,
    /// Whether subscribers were notified of a loss that no successful flush has followed yet.
    is_reported: AtomicBool,
}

type Subscriber = Box<dyn Fn(&LostWrite) + Send>;

static SUBSCRIBERS: Mutex<Vec<Subscriber>> = Mutex::new(Vec::new());

/// Has `subscriber` be called when a file that this process has open loses writes, on a thread of its own: once
/// until a flush of the file succeeds again. For as long as the process lives.
pub fn subscribe_lost_writes(subscriber: impl Fn(&LostWrite) + Send + 'static) {
    SUBSCRIBERS.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(subscriber));
}

impl LostWriteCounts {
    /// How many there are. A number by itself: the kernel reports a loss to each channel, so no
    /// channel depends on another's store being seen in time.
    #[inline]
    pub(super) fn loss_count(&self) -> u64 {
        self.noted.load(Ordering::Relaxed)
    }

    /// How many of them some owner has acknowledged: a channel that is opened now fails no flush for these.
    pub(super) fn acknowledged_loss_count(&self) -> u64 {
        self.acknowledged_count.load(Ordering::Relaxed)
    }

    /// An owner has acknowledged the first `count` losses.
    pub(super) fn acknowledge_up_to(&self, count: u64) {
        self.acknowledged_count.fetch_max(count, Ordering::Relaxed);
    }

    /// A flush has succeeded, and nothing is lost that its owner has not acknowledged: the next loss is
    /// reported again.
    #[inline]
    pub(super) fn rearm_report_after_flush(&self) {
        if self.is_reported.load(Ordering::Relaxed) {
            self.is_reported.store(false, Ordering::Relaxed);
        }
    }

    /// Notes a loss, and reports it unless the one before was not followed by a successful flush.
    #[cold]
    pub(super) fn count_and_report_loss(&self, path: &Path, errno: Errno) {
        self.noted.fetch_add(1, Ordering::Relaxed);
        if self.is_reported.swap(true, Ordering::Relaxed) {
            return;
        }
        let lost = LostWrite { path: path.into(), error: errno.to_string() };
        // A callback may block, and a channel must not.
        let tell = move |_: &tenmil_linux::StopFlag| {
            let hearers = SUBSCRIBERS.lock().unwrap_or_else(PoisonError::into_inner);
            hearers.iter().for_each(|subscriber| subscriber(&lost));
        };
        if let Ok(thread) = NamedThread::spawn("lost-write", None, tell) {
            // The thread ends by itself and is not joined.
            std::mem::forget(thread);
        }
    }
}

impl fmt::Display for LostWrite {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, error } = self;
        write!(
            out,
            "flush {}: {error}; completed writes may be lost, so every flush and forced write fails: \
             a pool or mirror on it acknowledges that and recovers, for others open it anew",
            path.display()
        )
    }
}

/// Why what was lost cannot be read again, and what to do.
pub(super) fn unreadable_loss_hint(path: &dyn fmt::Display, why: BufferedReason) -> String {
    let fix = match why {
        BufferedReason::Requested => "open it without direct=no".into(),
        BufferedReason::UnitTooSmall(needed) => format!("open it with block={needed}"),
        BufferedReason::NotSupported(_) => {
            "end this process, drop the page cache (echo 1 > /proc/sys/vm/drop_caches), and start again"
                .into()
        }
    };
    format!(
        "{path} is read through the page cache, which may hold blocks that are not on the disk, expected \
         direct transfers; fix: {fix}"
    )
}

/// Whether a direct forced write that failed may have reported that earlier writes were lost. Not if the
/// kernel refuses it before it begins, nor if it finds the file system full: that is about its own blocks.
pub(super) fn may_report_lost_writes(errno: Errno) -> bool {
    !matches!(
        errno,
        Errno::FAULT | Errno::INVAL | Errno::FBIG | Errno::NOMEM | Errno::NOSPC | Errno::DQUOT
    )
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use tenmil_linux::Errno;

    use super::{LostWriteCounts, subscribe_lost_writes};

    #[test]
    fn lost_write_is_reported_once_until_a_flush_succeeds() {
        let path = Path::new("a file of lost_write_is_reported_once_until_a_flush_succeeds");
        let receivers = [(); 2].map(|()| {
            let (sender, reported_values) = channel();
            subscribe_lost_writes(move |lost| {
                // After the test, the receiver is dropped.
                let _ = if lost.path == path { sender.send(lost.error.clone()) } else { Ok(()) };
            });
            reported_values
        });
        // The same for every subscriber.
        let next = || {
            let [one, other] =
                [0, 1].map(|at| receivers[at].recv_timeout(Duration::from_secs(60)).unwrap());
            assert_eq!(one, other);
            one
        };
        let losses = LostWriteCounts::default();
        losses.count_and_report_loss(path, Errno::IO);
        assert_eq!(next(), Errno::IO.to_string());
        (0..100).for_each(|_| losses.count_and_report_loss(path, Errno::NOSPC));
        losses.rearm_report_after_flush();
        losses.count_and_report_loss(path, Errno::DQUOT);
        assert_eq!(next(), Errno::DQUOT.to_string());
    }

    #[test]
    fn acknowledging_fewer_losses_later_has_no_effect() {
        let losses = LostWriteCounts::default();
        losses.acknowledge_up_to(2);
        losses.acknowledge_up_to(1);
        assert_eq!(losses.acknowledged_loss_count(), 2);
    }
}
