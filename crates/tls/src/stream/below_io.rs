//! Session and stream below: encrypted bytes between the two.

use tenmil_base::{RecvResult, Stream, StreamError};

use super::pending_records::PendingRecords;
use crate::cipher_io::{CipherIo, Received, ReceivedMore};
use crate::error::TlsError;
use crate::session::TlsSession;

/// Session and stream below.
pub(super) struct Lower {
    pub(super) below: Box<dyn Stream>,
    pub(super) session: TlsSession,
    pub(super) pending: PendingRecords,
}

/// How often one call receives from the stream below. A call that moves bytes is one system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Receives {
    None,
    One,
    Unlimited,
}

/// Stream below, as the session sees it during one call.
struct BelowIo<'a> {
    below: &'a mut dyn Stream,
    pending: &'a mut PendingRecords,
    receives: Receives,
    failure: Option<StreamError>,
}

impl Lower {
    pub(super) fn new(below: Box<dyn Stream>, session: TlsSession) -> Self {
        Self { below, session, pending: PendingRecords::default() }
    }

    /// Runs `act` with the stream below, whose failure is that of the call. What it sends is pending
    /// afterwards.
    #[inline]
    pub(super) fn with_io<R>(
        &mut self,
        receives: Receives,
        act: impl FnOnce(&mut TlsSession, &mut dyn CipherIo) -> Result<R, TlsError>,
    ) -> Result<R, TlsError> {
        let Self { below, session, pending } = self;
        let mut io = BelowIo { below: &mut **below, pending, receives, failure: None };
        let result = act(session, &mut io);
        match (result, io.failure) {
            (Err(_), Some(failure)) => Err(TlsError::Stream(failure)),
            (result, _) => result,
        }
    }

    /// Whether a receive makes progress without receiving from below.
    pub(super) fn has_more(&self) -> bool {
        self.session.has_more(self.below.buffered())
    }

    /// Moves the start of a record from the stream below to the session: the stream below may have few
    /// receive buffers for all streams of its thread, or one that is too small for a record.
    pub(super) fn store_partial_record(&mut self) {
        let stored = self.with_io(Receives::None, |session, io| {
            session.store_partial_record(io);
            Ok(())
        });
        debug_assert_eq!(stored, Ok(()), "nothing is received");
    }
}

impl BelowIo<'_> {
    /// Receives, if this call may. `None` if it may not.
    fn receive(&mut self) -> Option<RecvResult> {
        match self.receives {
            Receives::None => return None,
            Receives::One => self.receives = Receives::None,
            Receives::Unlimited => {}
        }
        let received = self.below.receive();
        if let RecvResult::Failed(failure) = &received {
            self.failure = Some(failure.clone());
        }
        Some(received)
    }
}

impl CipherIo for BelowIo<'_> {
    #[inline]
    fn received(&mut self) -> Received<'_> {
        if self.below.buffered().is_empty() {
            match self.receive() {
                Some(RecvResult::Bytes(_)) => {}
                None | Some(RecvResult::WouldBlock) => return Received::WouldBlock,
                Some(RecvResult::Eof | RecvResult::Failed(_)) => return Received::End,
            }
        }
        Received::Bytes(self.below.buffered())
    }

    fn receive_more(&mut self) -> ReceivedMore {
        match self.receive() {
            Some(RecvResult::Bytes(_)) => ReceivedMore::Bytes,
            None => ReceivedMore::Later,
            Some(RecvResult::WouldBlock) => ReceivedMore::NotPossible,
            Some(RecvResult::Eof | RecvResult::Failed(_)) => ReceivedMore::End,
        }
    }

    #[inline]
    fn consume(&mut self, count: usize) {
        self.below.consume(count);
    }

    #[inline]
    fn outgoing(&mut self) -> &mut Vec<u8> {
        self.pending.bytes_mut()
    }
}
