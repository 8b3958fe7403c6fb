//! DH-HMAC-CHAP on one queue: the messages of Authentication Send and Receive (Base 2.2 §6.1, §6.2,
//! §8.3.4), and the Diffie-Hellman jobs between them.
//!
//! ```text
//!   Send NEGOTIATE ─▶ Computing ─ result ─▶ MessageReady ─▶ Receive CHALLENGE
//!   Send REPLY ─────▶ Computing ─ result ─▶ MessageReady ─▶ Receive SUCCESS1, or FAILURE1
//!   Send SUCCESS2, if the controller has proved its identity, too
//! ```
//!
//! A Receive that arrives during `Computing` is held until the result is there. With FAILURE1 the
//! connection ends.

mod dh_jobs;

use std::fmt;
use std::sync::Arc;

use tenmil_base::{Instant, Span};
use tenmil_nvme_auth::{
    Authenticated, ChapSecret, ConfigError, Controller, ControllerConfig, Failure, FailureReason,
    FailureSide, Randomness, Step,
};
use tenmil_wire::Status;
use zeroize::Zeroizing;

use super::connection_handle::ConnectionHandle;

pub(super) use dh_jobs::DhJobs;
#[cfg(test)]
pub(super) use dh_jobs::RUNNING_MAX;
use dh_jobs::{DhResultSlot, DhResultState};

/// Authentications of one queue, one after the other.
pub(super) struct QueueAuthentication {
    controller: Controller,
    /// Secrets of the exchange in progress.
    secrets: Vec<ChapSecret>,
    state: AuthenticationState,
    /// Receive that waits for the next message.
    held_receive: Option<u16>,
    /// End of the time for the exchange; [`Instant::NEVER`] if none is in progress.
    ends_at: Instant,
    /// Exchanges that were begun since the last one that succeeded.
    exchanges: u32,
    context: AuthenticationContext,
    /// Address of the peer without its port, for the order of jobs.
    address: String,
    handle: Arc<ConnectionHandle>,
}

/// What the authentications of all queues share.
#[derive(Clone)]
pub(super) struct AuthenticationContext {
    pub(super) jobs: DhJobs,
    pub(super) random: RandomSource,
}

/// Generator of random bytes that are fit for keys. Returns false if it has none.
pub(super) type RandomSource = Arc<dyn Fn(&mut [u8]) -> bool + Send + Sync>;

/// What the exchange waits for.
#[derive(Debug)]
enum AuthenticationState {
    /// A message of the host.
    Idle,
    /// The result of a job.
    Computing(Arc<DhResultSlot>),
    /// A Receive that transfers the message.
    MessageReady { message: Vec<u8>, outcome: ExchangeOutcome },
    /// Nothing: the connection ends.
    Failed,
}

/// What is true once a message was transferred.
#[derive(Debug)]
enum ExchangeOutcome {
    /// The exchange continues.
    Open,
    Authenticated(Box<Authenticated>),
    Failed(Failure),
}

/// What the connection does with a command.
#[derive(Debug)]
pub(super) enum AuthenticationAction {
    /// Completes it with this status.
    Complete(Status),
    /// Completes the Receive with this message.
    Transfer(Vec<u8>),
    /// Completes it later.
    Hold,
    /// The queue is authenticated: completes the command, with the message if it is a Receive.
    Authenticated { message: Vec<u8>, proof: Box<AuthenticationProof> },
    /// Completes the command, with the message if it is a Receive, and ends the connection.
    Fail { message: Vec<u8>, failure: Failure },
}

/// Completed authentication.
#[derive(Clone, Debug)]
pub(super) struct AuthenticationProof {
    pub(super) outcome: Authenticated,
    /// Secret that the host has proved to have.
    pub(super) secret: ChapSecret,
}

/// Time for an exchange, and from Connect to the end of the first one.
pub(super) const AUTHENTICATION_TIMEOUT: Span = Span::from_secs(30);
/// The same for a connection that was accepted while connections without Connect occupied half of the
/// free slots.
pub(super) const AUTHENTICATION_TIMEOUT_CROWDED: Span = Span::from_secs(5);
/// Interval at which the result of a job is checked, beside the wake-up.
const RESULT_CHECK_INTERVAL: Span = Span::from_ms(1);
/// Exchanges that a host may begin before it completes one.
const EXCHANGES_MAX: u32 = 4;
/// Status of a command that the exchange does not await.
const OUT_OF_SEQUENCE: Status = Status::COMMAND_SEQUENCE_ERROR.with_dnr();

impl QueueAuthentication {
    /// Creates the authentication of a queue of a peer with this address.
    pub(super) fn new(
        config: ControllerConfig,
        context: AuthenticationContext,
        address: &str,
        handle: &Arc<ConnectionHandle>,
    ) -> Result<Self, ConfigError> {
        let secrets = config.host_secrets.clone();
        Ok(Self {
            controller: Controller::new(config)?,
            secrets,
            state: AuthenticationState::Idle,
            held_receive: None,
            ends_at: Instant::NEVER,
            exchanges: 0,
            context,
            address: address.to_owned(),
            handle: Arc::clone(handle),
        })
    }

    /// Sets the end of the time for the first exchange.
    pub(super) fn set_deadline(&mut self, ends_at: Instant) {
        self.ends_at = ends_at;
    }

    /// Replaces secrets and policy, unless an exchange is in progress.
    pub(super) fn refresh_config(&mut self, config: ControllerConfig) -> Result<(), ConfigError> {
        if self.is_in_progress() {
            return Ok(());
        }
        let secrets = config.host_secrets.clone();
        self.controller.set_config(config)?;
        self.secrets = secrets;
        Ok(())
    }

    /// Whether an exchange is in progress.
    pub(super) fn is_in_progress(&self) -> bool {
        self.ends_at != Instant::NEVER
    }

    /// Whether the time for the exchange has passed.
    pub(super) fn is_expired(&self, now: Instant) -> bool {
        now >= self.ends_at
    }

    /// When it has to be polled next.
    pub(super) fn wake_at(&self, now: Instant) -> Instant {
        match self.state {
            AuthenticationState::Computing(_) => self.ends_at.min(now.after(RESULT_CHECK_INTERVAL)),
            _ => self.ends_at,
        }
    }

    /// Handles the message of an Authentication Send command.
    pub(super) fn handle_send(&mut self, now: Instant, message: &[u8]) -> AuthenticationAction {
        if !self.awaits_message() {
            return AuthenticationAction::Complete(OUT_OF_SEQUENCE);
        }
        if !self.is_in_progress() {
            self.ends_at = now.after(AUTHENTICATION_TIMEOUT);
        }
        let mut has_random = true;
        let Self { controller, context, exchanges, .. } = self;
        let step = controller.handle_message(message, || {
            *exchanges += 1;
            let mut bytes = Zeroizing::new([0; Randomness::BYTES]);
            has_random = (context.random)(&mut *bytes);
            Randomness::new(&bytes)
        });
        if !has_random {
            return self.abandon("the system has no random numbers for a challenge");
        }
        if self.exchanges > EXCHANGES_MAX {
            return self.abandon("the host began exchanges and completed none, expected at most 4");
        }
        match step {
            Step::Authenticated { message: None, outcome } => {
                self.state = AuthenticationState::Idle;
                self.succeed(Vec::new(), outcome)
            }
            Step::Failed { message: None, failure } => {
                self.state = AuthenticationState::Failed;
                AuthenticationAction::Fail { message: Vec::new(), failure }
            }
            step => {
                self.record_step(step);
                AuthenticationAction::Complete(Status::SUCCESS)
            }
        }
    }

    /// Handles an Authentication Receive command with space for `len_bytes`.
    pub(super) fn handle_receive(&mut self, tag: u16, len_bytes: usize) -> AuthenticationAction {
        self.take_result();
        if self.held_receive.is_some() {
            return AuthenticationAction::Complete(OUT_OF_SEQUENCE);
        }
        match core::mem::replace(&mut self.state, AuthenticationState::Idle) {
            AuthenticationState::MessageReady { message, outcome } if message.len() > len_bytes => {
                self.state = AuthenticationState::MessageReady { message, outcome };
                AuthenticationAction::Complete(Status::INVALID_FIELD.with_dnr())
            }
            AuthenticationState::MessageReady { message, outcome: ExchangeOutcome::Open } => {
                AuthenticationAction::Transfer(message)
            }
            AuthenticationState::MessageReady {
                message,
                outcome: ExchangeOutcome::Authenticated(outcome),
            } => self.succeed(message, *outcome),
            AuthenticationState::MessageReady {
                message,
                outcome: ExchangeOutcome::Failed(failure),
            } => {
                self.state = AuthenticationState::Failed;
                AuthenticationAction::Fail { message, failure }
            }
            state @ AuthenticationState::Computing(_) => {
                (self.state, self.held_receive) = (state, Some(tag));
                AuthenticationAction::Hold
            }
            state => {
                self.state = state;
                AuthenticationAction::Complete(OUT_OF_SEQUENCE)
            }
        }
    }

    /// Receive that was held, once its message is ready: it is to be handled again.
    pub(super) fn take_ready_receive(&mut self) -> Option<u16> {
        self.take_result();
        match self.state {
            AuthenticationState::Computing(_) => None,
            _ => self.held_receive.take(),
        }
    }

    /// Whether a message of the host can be handled. A message during a job or in place of an awaited
    /// Receive is an error that the controller reports.
    fn awaits_message(&self) -> bool {
        match &self.state {
            AuthenticationState::Idle | AuthenticationState::Computing(_) => true,
            AuthenticationState::MessageReady { outcome, .. } => {
                matches!(outcome, ExchangeOutcome::Open)
            }
            AuthenticationState::Failed => false,
        }
    }

    /// Takes the result of a job, if it has arrived.
    fn take_result(&mut self) {
        let AuthenticationState::Computing(slot) = &self.state else { return };
        let result = match slot.take() {
            DhResultState::Pending => return,
            DhResultState::Done(result) => Some(result),
            DhResultState::Dropped => None,
        };
        match result.and_then(|result| self.controller.handle_dh_result(result)) {
            Some(step) => self.record_step(step),
            None => {
                let failure = local_failure("the Diffie-Hellman computation was not run");
                let (message, outcome) = (Vec::new(), ExchangeOutcome::Failed(failure));
                self.state = AuthenticationState::MessageReady { message, outcome };
            }
        }
    }

    fn record_step(&mut self, step: Step) {
        let (message, outcome) = match step {
            Step::Compute(job) => {
                let slot = self.context.jobs.submit(&self.address, job, &self.handle);
                self.state = AuthenticationState::Computing(slot);
                // An executor may have run it at once.
                return self.take_result();
            }
            Step::Message(message) => (Some(message), ExchangeOutcome::Open),
            Step::Authenticated { message, outcome } => {
                (message, ExchangeOutcome::Authenticated(Box::new(outcome)))
            }
            Step::Failed { message, failure } => (message, ExchangeOutcome::Failed(failure)),
        };
        let message = message.unwrap_or_default();
        self.state = AuthenticationState::MessageReady { message, outcome };
    }

    /// Ends the exchange successfully.
    fn succeed(&mut self, message: Vec<u8>, outcome: Authenticated) -> AuthenticationAction {
        let secret = outcome.peer_secret.and_then(|index| self.secrets.get(index)).cloned();
        let Some(secret) = secret else {
            return self.abandon("the host has proved no secret");
        };
        (self.ends_at, self.exchanges) = (Instant::NEVER, 0);
        let proof = Box::new(AuthenticationProof { outcome, secret });
        AuthenticationAction::Authenticated { message, proof }
    }

    /// Ends the exchange without a message.
    fn abandon(&mut self, detail: &str) -> AuthenticationAction {
        self.controller.cancel();
        self.state = AuthenticationState::Failed;
        AuthenticationAction::Fail { message: Vec::new(), failure: local_failure(detail) }
    }
}

fn local_failure(detail: &str) -> Failure {
    let reason = FailureReason::AuthenticationFailed;
    Failure { reason, side: FailureSide::Local, detail: detail.to_owned() }
}

impl AuthenticationContext {
    /// Jobs run on the calling thread, random bytes are of the kernel.
    pub(super) fn new() -> Self {
        let random = |bytes: &mut [u8]| tenmil_linux::fill_secure_random(bytes).is_ok();
        Self { jobs: DhJobs::new(), random: Arc::new(random) }
    }
}

impl fmt::Debug for QueueAuthentication {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("QueueAuthentication")
            .field("state", &self.state)
            .field("exchanges", &self.exchanges)
            .finish_non_exhaustive()
    }
}
