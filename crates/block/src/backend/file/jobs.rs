//! Who carries out the jobs of a file.

use std::fmt;

use base::WakeSource;
use host::engine::{Ended, Engine, Job, Refused};

/// The kernel, or in tests a disk whose power can be cut. What each does is said at [`Engine`]; a
/// channel is made for one of them, so that nothing is dispatched on the way of an I/O.
pub(crate) trait Jobs: fmt::Debug + Send {
    fn submit(&mut self, token: u64, job: Job<'_>) -> Result<(), Refused>;
    fn flush(&mut self);
    fn poll(&mut self, ended: &mut Vec<Ended>);
    fn wake_source(&self) -> WakeSource<'_>;
    fn arm(&mut self) -> bool;
    fn disarm(&mut self);
    fn has_unstarted(&self) -> bool;
}

impl Jobs for Engine {
    #[inline]
    fn submit(&mut self, token: u64, job: Job<'_>) -> Result<(), Refused> {
        self.submit(token, job)
    }

    #[inline]
    fn flush(&mut self) {
        self.flush();
    }

    #[inline]
    fn poll(&mut self, ended: &mut Vec<Ended>) {
        self.poll(ended);
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Descriptor(self.descriptor())
    }

    fn arm(&mut self) -> bool {
        self.arm()
    }

    fn disarm(&mut self) {
        self.disarm();
    }

    fn has_unstarted(&self) -> bool {
        self.has_unstarted()
    }
}
