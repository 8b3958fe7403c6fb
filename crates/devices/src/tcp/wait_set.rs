//! Wait handle of the thread of a queue: one descriptor for the current socket and for a waker.

use std::os::fd::AsFd;
use std::sync::Arc;

use tenmil_base::{Interrupts, SharedWaker, Wake, WakeSource};
use tenmil_linux::EventFdVectors;
use tenmil_linux::poll_set::{Interest, PollSet};
use tenmil_nvme_fabrics::WaitHandle;

/// Wait set with one descriptor.
pub(super) struct WaitSet {
    watch: PollSet,
    waker: EventFdVectors,
    /// Number of sockets added so far, which is the token of the last one.
    watched: u64,
}

struct WaitSetNotifier(EventFdVectors);

const READABLE: Interest = Interest { readable: true, writable: false };

impl WaitSet {
    pub(super) fn new() -> std::io::Result<Self> {
        let (watch, waker) = (PollSet::new()?, EventFdVectors::new(1)?);
        let descriptor = waker.descriptor(0).ok_or(std::io::ErrorKind::InvalidInput)?;
        watch.add(descriptor, 0, READABLE)?;
        Ok(Self { watch, waker, watched: 0 })
    }

    pub(super) fn descriptor(&self) -> &PollSet {
        &self.watch
    }
}

impl WaitHandle for WaitSet {
    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Descriptor(self.watch.as_fd())
    }

    fn watch(&mut self, stream: WakeSource<'_>) -> bool {
        let WakeSource::Descriptor(descriptor) = stream else { return false };
        self.watched += 1;
        // The previous socket is closed, which has removed it from the set.
        self.watch.add(descriptor, self.watched, READABLE).is_ok()
    }

    fn waker(&self) -> SharedWaker {
        Arc::new(WaitSetNotifier(self.waker.clone()))
    }

    fn clear(&mut self) {
        self.waker.unmask(0);
    }
}

impl Wake for WaitSetNotifier {
    fn wake(&self) {
        self.0.clone().raise(0);
    }
}
