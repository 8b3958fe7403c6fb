//! TLS connections over the connections of another connector.
//!
//! ```text
//!   Below: a TCP connection ──▶ Handshake: as client, with the keys of the device ──▶ a stream
//!            ▲                    │  └── deadline of its own
//!            └── the next key ────┘ refused
//! ```
//!
//! The first handshake offers all keys. Servers with GnuTLS, as Linux's target with tlshd, look for a key of
//! the first identity only and end the handshake if they have none, so each other key is then offered alone.
//! The key that was accepted is offered first from then on.
//!
//! The handshake runs on the thread that connects the device, which is none that serves I/O.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use tenmil_base::{Instant, Span, Stream, StreamError, WakeSource};
use tenmil_dma::RegionTable;
use tenmil_nvme_auth::TlsPsk;
use tenmil_nvme_fabrics::{Connector, PendingConnect, SecureChannelMode};
use tenmil_tls::{ClientConfig, TlsError, TlsSession, TlsStream};

use super::security::DeviceKeys;

/// Connects with TLS.
pub(super) struct TlsConnector {
    below: Arc<Mutex<Box<dyn Connector>>>,
    keys: DeviceKeys,
    /// Identity that the server has accepted.
    accepted: Arc<Mutex<Option<String>>>,
    /// Keys that an authentication has generated; empty: the next connection is plaintext.
    generated: Vec<TlsPsk>,
    regions: RegionTable,
}

/// A connect in progress.
struct TlsConnect {
    stage: TlsStage,
    /// Keys of this handshake.
    offered: Vec<TlsPsk>,
    /// Keys of later handshakes, each alone.
    others: VecDeque<TlsPsk>,
    /// Error of the first handshake, which names all identities.
    problem: Option<StreamError>,
    /// For another stream, which has to be open by `until`.
    below: Arc<Mutex<Box<dyn Connector>>>,
    until: Instant,
    accepted: Arc<Mutex<Option<String>>>,
    keys: DeviceKeys,
    regions: RegionTable,
}

/// Stage of a connect, named for what it awaits.
enum TlsStage {
    Stream(Box<dyn PendingConnect>),
    Handshake { stream: Box<TlsStream>, until: Instant },
    Nothing,
}

/// Time limit of a handshake, as that of Linux.
const HANDSHAKE_TIMEOUT: Span = Span::from_secs(10);

impl TlsConnector {
    pub(super) fn new(below: Box<dyn Connector>, keys: DeviceKeys, regions: &RegionTable) -> Self {
        let (below, accepted) = (Arc::new(Mutex::new(below)), Arc::default());
        Self { below, keys, accepted, generated: Vec::new(), regions: regions.clone() }
    }
}

/// Starts to open a stream of the connector below.
fn begin_stream(
    below: &Mutex<Box<dyn Connector>>,
    now: Instant,
    until: Instant,
) -> Box<dyn PendingConnect> {
    below.lock().unwrap_or_else(PoisonError::into_inner).begin_connect(now, until)
}

impl Connector for TlsConnector {
    fn begin_connect(&mut self, now: Instant, until: Instant) -> Box<dyn PendingConnect> {
        let mut offered = match self.keys.security().tls {
            SecureChannelMode::Concatenate if self.generated.is_empty() => {
                return begin_stream(&self.below, now, until);
            }
            SecureChannelMode::Concatenate => self.generated.clone(),
            SecureChannelMode::Required | SecureChannelMode::Off => self.keys.tls_psks(),
        };
        let accepted = self.accepted.lock().unwrap_or_else(PoisonError::into_inner).clone();
        // Stable: the others stay in the order of preference.
        offered.sort_by_key(|psk| accepted.as_ref() != Some(&psk.identity));
        Box::new(TlsConnect {
            stage: TlsStage::Stream(begin_stream(&self.below, now, until)),
            others: offered.iter().skip(1).cloned().collect(),
            offered,
            problem: None,
            below: Arc::clone(&self.below),
            until,
            accepted: Arc::clone(&self.accepted),
            keys: self.keys.clone(),
            regions: self.regions.clone(),
        })
    }

    fn set_generated_keys(&mut self, keys: &[TlsPsk]) -> bool {
        self.generated = keys.to_vec();
        self.keys.security().tls == SecureChannelMode::Concatenate
    }

    fn peer(&self) -> String {
        self.below.lock().unwrap_or_else(PoisonError::into_inner).peer()
    }
}

impl TlsConnect {
    /// Begins the handshake over a stream that is open.
    fn begin_handshake(
        &self,
        now: Instant,
        stream: Box<dyn Stream>,
    ) -> Result<TlsStage, StreamError> {
        let config = ClientConfig::with_psks(self.offered.iter().cloned())?;
        let session = TlsSession::client(&config)?;
        let stream = Box::new(TlsStream::new(stream, session, self.regions.clone()));
        Ok(TlsStage::Handshake { stream, until: now.after(HANDSHAKE_TIMEOUT) })
    }

    /// Opens another stream for a handshake with the next key, or fails with the error of the first one. If
    /// all are refused, they are looked up again for the next connect.
    fn handle_failed_handshake(
        &mut self,
        now: Instant,
        error: TlsError,
    ) -> Result<(), StreamError> {
        let is_refused = matches!(error, TlsError::KeyRefused { .. });
        let problem = self.problem.take().unwrap_or_else(|| error.into());
        let Some(next) = self.others.pop_front().filter(|_| now < self.until) else {
            if is_refused && self.keys.security().tls == SecureChannelMode::Required {
                self.keys.start_lookup();
            }
            return Err(problem);
        };
        self.problem = Some(problem);
        self.offered = vec![next];
        self.stage = TlsStage::Stream(begin_stream(&self.below, now, self.until));
        Ok(())
    }
}

impl PendingConnect for TlsConnect {
    fn poll(&mut self, now: Instant) -> Option<Result<Box<dyn Stream>, StreamError>> {
        if let TlsStage::Stream(pending) = &mut self.stage {
            let opened = pending.poll(now)?;
            match opened.and_then(|stream| self.begin_handshake(now, stream)) {
                Ok(stage) => self.stage = stage,
                Err(error) => return Some(Err(error)),
            }
        }
        let TlsStage::Handshake { stream, until } = &mut self.stage else { return None };
        match stream.poll_handshake() {
            Ok(false) if now < *until => return None,
            Ok(false) => {
                let text = format!("TLS handshake: not complete within {HANDSHAKE_TIMEOUT}");
                return Some(Err(StreamError(text)));
            }
            Ok(true) => {}
            Err(error) => return self.handle_failed_handshake(now, error).err().map(Err),
        }
        // Of several identities, the server does not tell which one it has accepted.
        if let [only] = &self.offered[..] {
            let mut accepted = self.accepted.lock().unwrap_or_else(PoisonError::into_inner);
            *accepted = Some(only.identity.clone());
        }
        match core::mem::replace(&mut self.stage, TlsStage::Nothing) {
            TlsStage::Handshake { stream, .. } => Some(Ok(stream)),
            TlsStage::Stream(_) | TlsStage::Nothing => None,
        }
    }

    fn wake_source(&self) -> WakeSource<'_> {
        match &self.stage {
            TlsStage::Stream(pending) => pending.wake_source(),
            TlsStage::Handshake { stream, .. } => stream.wake_source(),
            TlsStage::Nothing => WakeSource::None,
        }
    }

    fn handshake_deadline(&self) -> Option<Instant> {
        match &self.stage {
            TlsStage::Handshake { until, .. } => Some(*until),
            TlsStage::Stream(_) | TlsStage::Nothing => None,
        }
    }
}

#[cfg(test)]
mod tests;
