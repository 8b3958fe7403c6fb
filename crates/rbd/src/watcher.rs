//! One thread for all images of the process: resizes, lost locks, and the removal of devices whose image is lost.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tenmil_base::{Error, Instant, Span};
use tenmil_block::Bdev;
use tenmil_linux::{EventFdVectors, NamedThread, StopFlag};

use crate::ceph_error::ImageLoss;
use crate::librbd::CephErrno;
use crate::open_image::OpenImage;

/// The thread that watches images. It ends with the last device.
pub(crate) struct Watcher {
    /// `Some` until it is dropped.
    thread: Option<NamedThread<()>>,
    watched: Arc<WatchedImages>,
}

/// A watched image, and the bdev of its device.
pub(crate) struct WatchedImage {
    image: Arc<OpenImage>,
    bdev: Bdev,
    is_removed: AtomicBool,
    /// When the lock was checked last, in nanoseconds of the clock.
    lock_checked_ns: AtomicU64,
}

struct WatchedImages {
    images: Mutex<Vec<Weak<WatchedImage>>>,
    /// Signaled by librbd when a header changes, and by a channel that finds its image lost.
    signal: EventFdVectors,
}

/// The watcher of the process, while a device exists.
static SHARED: Mutex<Weak<Watcher>> = Mutex::new(Weak::new());

/// How often the watcher looks for locks to check.
const INTERVAL: Span = Span::from_secs(1);
/// How often the lock of an image is checked, which is a request to the cluster: an idle image has no other request that
/// would fail.
const LOCK_CHECK_INTERVAL: Span = Span::from_secs(5);
/// Maximum number of locks that are checked in an interval.
const LOCK_CHECKS_MAX: usize = 20;
/// Maximum time that the last device waits for the thread, which may wait for the cluster.
const STOP_LIMIT: Span = Span::from_secs(2);
const STOP_INTERVAL: Span = Span::from_ms(1);

impl Watcher {
    /// The watcher of the process.
    ///
    /// # Errors
    ///
    /// If a thread or a descriptor cannot be had.
    pub(crate) fn shared() -> Result<Arc<Self>, Error> {
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(watcher) = shared.upgrade() {
            return Ok(watcher);
        }
        let watcher = Arc::new(Self::start()?);
        *shared = Arc::downgrade(&watcher);
        Ok(watcher)
    }

    fn start() -> Result<Self, Error> {
        let refused = |error| Error::environment(format!("watch images of Ceph: {error}"));
        let signal = EventFdVectors::new(1).map_err(refused)?;
        let watched = Arc::new(WatchedImages { images: Mutex::default(), signal });
        let theirs = Arc::clone(&watched);
        let thread = NamedThread::spawn("rbd-watch", None, move |stop: &StopFlag| {
            while !stop.is_stopped() {
                // A wait that fails is one that returns early.
                if theirs.signal.wait_for_signal(0, INTERVAL).is_err() {
                    tenmil_linux::named_thread::sleep(INTERVAL);
                }
                theirs.look(stop);
            }
        })
        .map_err(refused)?;
        Ok(Self { thread: Some(thread), watched })
    }

    /// What wakes the watcher.
    pub(crate) fn signal(&self) -> &EventFdVectors {
        &self.watched.signal
    }

    /// Watches an image until the result is dropped.
    pub(crate) fn watch(&self, image: WatchedImage) -> Arc<WatchedImage> {
        let image = Arc::new(image);
        self.watched.lock().push(Arc::downgrade(&image));
        image
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        thread.stop_flag().set();
        self.watched.signal.signal(0);
        let rounds = STOP_LIMIT.ns / STOP_INTERVAL.ns;
        for _ in 0..rounds {
            if thread.is_finished() {
                return thread.join();
            }
            tenmil_linux::named_thread::sleep(STOP_INTERVAL);
        }
        // It waits for the cluster, and ends when that answers or its time limit passes.
        std::mem::forget(thread);
    }
}

impl WatchedImages {
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Weak<WatchedImage>>> {
        self.images.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at every image. Never called on a thread that does I/O.
    fn look(&self, stop: &StopFlag) {
        let mut images = self.lock();
        images.retain(|image| image.strong_count() > 0);
        let mut open: Vec<Arc<WatchedImage>> = images.iter().filter_map(Weak::upgrade).collect();
        drop(images);
        for image in &open {
            image.adopt_size();
        }
        open.sort_unstable_by_key(|image| image.lock_checked_ns.load(Ordering::Relaxed));
        let due = open.iter().filter(|image| image.is_lock_check_due());
        for image in due.take(LOCK_CHECKS_MAX) {
            if stop.is_stopped() {
                break;
            }
            image.check_lock();
        }
        for image in &open {
            image.remove_if_lost();
        }
    }
}

impl WatchedImage {
    pub(crate) fn new(image: Arc<OpenImage>, bdev: Bdev) -> Self {
        let lock_checked_ns = AtomicU64::new(image.now().ns);
        Self { image, bdev, is_removed: AtomicBool::new(false), lock_checked_ns }
    }

    /// Adopts the size after a change of the header.
    fn adopt_size(&self) {
        if !self.image.image().take_header_change() {
            return;
        }
        match self.image.refresh_size() {
            Ok(false) => {}
            Ok(true) => {
                self.bdev.set_resized_block_count(self.image.block_count());
                tenmil_block::refresh_sizes();
            }
            Err(errno) => self.report_if_lost(errno),
        }
    }

    fn is_lock_check_due(&self) -> bool {
        let last = Instant { ns: self.lock_checked_ns.load(Ordering::Relaxed) };
        self.image.keeps_lock()
            && self.image.loss().is_none()
            && self.image.now().since(last) >= LOCK_CHECK_INTERVAL
    }

    fn check_lock(&self) {
        self.lock_checked_ns.store(self.image.now().ns, Ordering::Relaxed);
        match self.image.image().owns_lock() {
            Ok(true) => {}
            Ok(false) => self.image.report_loss(ImageLoss::LockLost),
            Err(errno) => self.report_if_lost(errno),
        }
    }

    fn report_if_lost(&self, errno: CephErrno) {
        if let Some(loss) = ImageLoss::from_errno(errno, self.image.is_writable()) {
            self.image.report_loss(loss);
        }
    }

    fn remove_if_lost(&self) {
        let Some(loss) = self.image.loss() else { return };
        if self.is_removed.swap(true, Ordering::Relaxed) {
            return;
        }
        let name = self.image.name();
        tracing::error!(cause = %name, "{name} is removed: {loss}");
        self.bdev.remove();
        tenmil_block::remove_failed(self.image.identity());
    }
}
