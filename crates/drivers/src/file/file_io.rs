//! Interface to the kernel's file I/O, replaceable in tests.

use std::fmt;

use tenmil_base::WakeSource;
use tenmil_linux::file_engine::{FileEngine, FileOp, JobCompletion, SubmitError};

/// File I/O engine: the kernel, or in tests a disk with simulated power loss. The methods are documented
/// at [`FileEngine`]. A channel is generic over it, so the I/O path has no dynamic dispatch.
pub(crate) trait FileIo: fmt::Debug + Send {
    fn submit(&mut self, token: u64, job: FileOp<'_>) -> Result<(), SubmitError>;
    fn flush_submissions(&mut self);
    fn poll(&mut self, ended: &mut Vec<JobCompletion>);
    fn wake_source(&self) -> WakeSource<'_>;
    fn arm(&mut self) -> bool;
    fn disarm(&mut self);
    fn has_unsubmitted(&self) -> bool;
}

impl FileIo for FileEngine {
    #[inline]
    fn submit(&mut self, token: u64, job: FileOp<'_>) -> Result<(), SubmitError> {
        self.submit(token, job)
    }

    #[inline]
    fn flush_submissions(&mut self) {
        self.flush();
    }

    #[inline]
    fn poll(&mut self, ended: &mut Vec<JobCompletion>) {
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

    fn has_unsubmitted(&self) -> bool {
        self.has_unsubmitted()
    }
}
