//! Authentication of a connected controller again, and the generated key of secure channels.
//!
//! ```text
//!   plaintext admin connection ── authentication ──▶ key ──▶ all connections again, as secure channels
//!   secure admin connection ───── authentication ──▶ the next key, before the time of the first one ends
//!   any loss ──▶ the key is forgotten, and everything begins again in plaintext
//! ```

use tenmil_base::{Error, Instant, Span};
use tenmil_nvme_auth::{Authenticated, Concatenation, TlsPsk};

use super::HostTransport;
use super::admin_connection::AUTHENTICATION_TAG;
use super::controller_state_machine::ControllerStage;
use crate::authentication::Authentication;
use crate::options::SecureChannelMode;
use crate::queue_authentication::{ExchangeLink, QueueAuthentication};
use crate::queue_connect::{ChannelSecurity, QueueConnectError};

/// A key that an authentication has generated.
pub(super) struct GeneratedKey {
    /// When it has to be replaced.
    renew_at: Instant,
}

/// A generated key is replaced after this time: Linux deletes it after an hour.
pub(super) const RENEWAL_INTERVAL: Span = Span::from_secs(45 * 60);

/// Poll interval while something is awaited that wakes no thread.
const EXCHANGE_POLL_INTERVAL: Span = Span::from_ms(1);

impl HostTransport {
    /// What secures the next admin connection.
    pub(super) fn admin_channel_security(&mut self) -> Result<ChannelSecurity, Error> {
        match self.options.secure_channel {
            SecureChannelMode::Off => return Ok(ChannelSecurity::Any),
            SecureChannelMode::Required => return Ok(ChannelSecurity::SecureChannel),
            SecureChannelMode::Concatenate if self.generated_key.is_some() => {
                return Ok(ChannelSecurity::GeneratedKey);
            }
            SecureChannelMode::Concatenate => {}
        }
        if self.options.authentication.is_none() {
            let text = "secure channel concatenation without a secret of this host, expected one";
            return Err(Error::usage(text).with_hint("give the secret of this host by dhchap=NAME"));
        }
        if !self.connector.set_generated_keys(&[]) {
            return Err(no_secure_channels());
        }
        Ok(ChannelSecurity::GeneratesKey)
    }

    /// Has all connections from now on use the key that an authentication has generated.
    pub(super) fn use_generated_key(
        &mut self,
        now: Instant,
        outcome: &Authenticated,
    ) -> Result<(), QueueConnectError> {
        let (host, subsystem) = (&self.options.host, &self.options.subsystem);
        let Some(key) = outcome.tls_psk(host, subsystem) else {
            let text = format!("no TLS key can be made of an authentication with {}", outcome.hash);
            return Err(QueueConnectError::fatal(Error::remote(text)));
        };
        if !self.connector.set_generated_keys(core::slice::from_ref::<TlsPsk>(&key)) {
            return Err(QueueConnectError::fatal(no_secure_channels()));
        }
        self.generated_key = Some(GeneratedKey { renew_at: now.after(RENEWAL_INTERVAL) });
        Ok(())
    }

    /// Begins in plaintext again with the next admin connection.
    pub(super) fn forget_generated_key(&mut self) {
        if self.generated_key.take().is_some() {
            self.connector.set_generated_keys(&[]);
        }
    }

    /// Whether the controller is being authenticated again.
    pub(super) fn is_reauthenticating(&self) -> bool {
        let authentication = self.admin.as_ref().and_then(|admin| admin.authentication.as_ref());
        authentication.is_some_and(|authentication| authentication.is_in_progress())
    }

    /// Authenticates a connected controller again, if its secrets were replaced or the generated key is to
    /// be. Queues that are being connected are finished first.
    pub(super) fn poll_reauthentication(&mut self, now: Instant) {
        if !matches!(self.stage, ControllerStage::Ready) {
            return;
        }
        let memory = self.dma.pool();
        let Some(admin) = &mut self.admin else { return };
        match admin.poll_authentication(now, memory) {
            Some(Ok(outcome)) => {
                self.stats.authentications += 1;
                if outcome.generated_psk.is_some()
                    && let Err(failed) = self.use_generated_key(now, &outcome)
                {
                    self.handle_admin_loss(now, failed.error);
                }
            }
            Some(Err(failed)) => self.handle_admin_loss(now, failed.error),
            None if self.is_reauthentication_due(now) && !self.is_connecting_queue() => {
                self.reauthenticate(now);
            }
            None => {}
        }
    }

    fn is_reauthentication_due(&self, now: Instant) -> bool {
        let requested = self.options.authentication.as_ref().map(Authentication::generation);
        let is_requested = self
            .authenticated_generation
            .is_some_and(|_| self.authenticated_generation != requested);
        let is_key_old = self.generated_key.as_ref().is_some_and(|key| now >= key.renew_at);
        (is_requested || is_key_old) && !self.is_reauthenticating()
    }

    fn reauthenticate(&mut self, now: Instant) {
        let Self { options, admin, exchange_buffers, dma, generated_key, .. } = self;
        let (Some(settings), Some(admin)) = (&options.authentication, admin) else { return };
        let concatenation = match generated_key {
            Some(_) => Concatenation::ReplaceTlsPsk,
            None => Concatenation::None,
        };
        self.authenticated_generation = Some(settings.generation());
        let link = ExchangeLink { connection: &mut admin.connection, memory: dma.pool() };
        let begun = match &mut admin.authentication {
            Some(authentication) => authentication.restart(now, options, concatenation, link),
            // A controller does not request the authentication of a queue whose key comes from one.
            none => {
                let created = exchange_buffers.allocate().ok_or_else(|| {
                    let problem = "authenticate again: no memory is left for the messages";
                    QueueConnectError::retryable(problem)
                });
                let created = created.and_then(|buffer| {
                    let exchange = (AUTHENTICATION_TAG, buffer);
                    QueueAuthentication::new(options, settings, exchange, concatenation)
                });
                created.and_then(|created| none.insert(created).start(now, link))
            }
        };
        if let Err(failed) = begun {
            self.handle_admin_loss(now, failed.error);
        }
    }

    /// Latest time of the next poll for this.
    pub(super) fn reauthentication_wake_at(&self, now: Instant) -> Instant {
        let key = self.generated_key.as_ref().map_or(Instant::NEVER, |key| key.renew_at);
        let authentication = self.admin.as_ref().and_then(|admin| admin.authentication.as_ref());
        match authentication.filter(|authentication| authentication.is_in_progress()) {
            Some(authentication) if authentication.needs_polling() => {
                now.after(EXCHANGE_POLL_INTERVAL).min(authentication.deadline())
            }
            Some(authentication) => authentication.deadline(),
            // A key that cannot be replaced now is replaced after the next event.
            None if key > now => key,
            None => Instant::NEVER,
        }
    }
}

fn no_secure_channels() -> Error {
    Error::usage("this host makes no TLS connections with generated keys, expected it to for tls=concatenate")
        .with_hint("use a program that is built with the feature `tls`")
}
