//! Authentication of one queue over its connection: the host's end of DH-HMAC-CHAP.
//!
//! ```text
//!   Sending ──▶ Receiving ──▶ (Computing) ──▶ Sending ──▶ Receiving ──▶ Sending ──▶ authenticated
//!   NEGOTIATE   CHALLENGE      DhJob          REPLY       SUCCESS1      SUCCESS2, if bidirectional
//! ```
//!
//! Each arrow has a time limit of its own. The owner passes the completions of the command with the
//! exchange's identifier, and polls.

use std::sync::{Arc, Mutex, PoisonError};

use tenmil_base::{Dma as _, Error, Instant, Mailbox, Memory as _, Segment, Span};
use tenmil_dma::DevicePool;
use tenmil_nvme_auth::{
    Authenticated, CHALLENGE_BUFFER_BYTES, Concatenation, DhResult, FailureReason, Host,
    HostConfig, SECURITY_PROTOCOL, SECURITY_PROTOCOL_SPECIFIC, Step,
};
use tenmil_nvme_tcp::DataDirection;
use tenmil_wire::fabrics::{AuthenticationReceive, AuthenticationSend, Connected};
use tenmil_wire::{Command, Completion, Status, TypedCommand};

use crate::authentication::Authentication;
use crate::options::{Options, SecureChannelMode};
use crate::queue_connect::QueueConnectError;
use crate::queue_connection::QueueConnection;
use crate::remote_dma::RemoteDma;

/// Authentication of a queue, which may be repeated.
pub(crate) struct QueueAuthentication {
    settings: Authentication,
    /// That of the secrets of the last exchange.
    generation: u64,
    host: Host,
    /// `HOSTNQN to SUBNQN`, for messages.
    names: String,
    concatenation: Concatenation,
    stage: ExchangeStage,
    until: Instant,
    /// Identifier of its commands. One is outstanding at most.
    cid: u16,
    buffer: ExchangeBuffer,
    computed: Arc<Mailbox<Option<DhResult>>>,
}

/// Stage of an exchange, named for what it awaits.
enum ExchangeStage {
    /// Nothing: no exchange is in progress.
    Idle,
    /// The completion of Authentication Send.
    Sending(NextStage),
    /// That the stream no longer reads the message that was sent.
    Releasing(NextStage),
    /// The completion of Authentication Receive.
    Receiving,
    /// The result of a computation.
    Computing,
}

/// What follows a message that is sent.
enum NextStage {
    /// The next message of the controller.
    Receive,
    /// The end: the exchange has succeeded.
    Authenticated(Box<Authenticated>),
    /// The end: the exchange has failed. The controller need not receive the message.
    Failed(QueueConnectError),
}

/// Result of a step: `None` while the exchange is in progress.
pub(crate) type ExchangeResult = Option<Result<Box<Authenticated>, QueueConnectError>>;

/// The connection of an exchange, and the memory of its data.
pub(crate) struct ExchangeLink<'a> {
    pub(crate) connection: &'a mut QueueConnection,
    pub(crate) memory: &'a DevicePool,
}

/// Buffers for messages, for as many exchanges as there are at a time.
pub(crate) struct ExchangeBuffers {
    dma: RemoteDma,
    free: Mutex<Vec<Segment>>,
    /// Buffers of exchanges that were given up, with the connections that may still send from them.
    retired: Mutex<Vec<(Box<QueueConnection>, Segment)>>,
}

/// Buffer for a message. It returns when it is dropped.
pub(crate) struct ExchangeBuffer {
    segment: Segment,
    is_retired: bool,
    owner: Arc<ExchangeBuffers>,
}

/// Interval of checks for retired buffers.
const RETIRED_CHECK_INTERVAL: Span = Span::from_ms(1);

#[expect(clippy::cast_possible_truncation, reason = "a few thousand")]
const BUFFER_BYTES: u32 = CHALLENGE_BUFFER_BYTES as u32;

impl ExchangeBuffers {
    pub(crate) fn new(dma: RemoteDma) -> Arc<Self> {
        Arc::new(Self { dma, free: Mutex::default(), retired: Mutex::default() })
    }

    /// A buffer, or `None` if memory is exhausted.
    pub(crate) fn allocate(self: &Arc<Self>) -> Option<ExchangeBuffer> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let segment = free.or_else(|| self.dma.allocate(BUFFER_BYTES))?;
        Some(ExchangeBuffer { segment, is_retired: false, owner: Arc::clone(self) })
    }

    /// Takes back the retired buffers that no stream reads any more.
    pub(crate) fn poll(&self) {
        let mut retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        let released =
            retired.extract_if(.., |(connection, _)| !connection.has_unreleased_memory());
        let segments: Vec<Segment> = released.map(|(_, segment)| segment).collect();
        self.free.lock().unwrap_or_else(PoisonError::into_inner).extend(segments);
    }

    /// Latest time of the next [`poll`](Self::poll).
    pub(crate) fn wake_at(&self, now: Instant) -> Instant {
        let retired = self.retired.lock().unwrap_or_else(PoisonError::into_inner);
        if retired.is_empty() { Instant::NEVER } else { now.after(RETIRED_CHECK_INTERVAL) }
    }
}

impl Drop for ExchangeBuffers {
    fn drop(&mut self) {
        let free = self.free.get_mut().unwrap_or_else(PoisonError::into_inner);
        let retired = self.retired.get_mut().unwrap_or_else(PoisonError::into_inner);
        let segments = free.drain(..).chain(retired.drain(..).map(|(_, segment)| segment));
        segments.for_each(|segment| self.dma.release(segment));
    }
}

impl ExchangeBuffer {
    /// Gives an exchange up with its connection, which may still send from the buffer.
    fn retire(mut self, mut connection: Box<QueueConnection>) {
        if connection.has_unreleased_memory() {
            connection.discard_unsent();
            self.is_retired = true;
            let mut retired = self.owner.retired.lock().unwrap_or_else(PoisonError::into_inner);
            retired.push((connection, self.segment));
        }
    }
}

impl Drop for ExchangeBuffer {
    fn drop(&mut self) {
        if self.is_retired {
            return;
        }
        let mut free = self.owner.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.push(self.segment);
    }
}

impl QueueAuthentication {
    /// Authentication of a queue, whose commands have the identifier `cid`. No exchange is in progress.
    pub(crate) fn new(
        options: &Options,
        settings: &Authentication,
        (cid, buffer): (u16, ExchangeBuffer),
        concatenation: Concatenation,
    ) -> Result<Self, QueueConnectError> {
        let generation = settings.generation();
        let config = host_config(options, settings, concatenation);
        let host = Host::new(config).map_err(|error| QueueConnectError::fatal(error.into()))?;
        Ok(Self {
            settings: settings.clone(),
            generation,
            host,
            names: format!("{} to {}", options.host, options.subsystem),
            concatenation,
            stage: ExchangeStage::Idle,
            until: Instant::NEVER,
            cid,
            buffer,
            computed: Arc::default(),
        })
    }

    /// Generation of the secrets of the last exchange.
    pub(crate) const fn generation(&self) -> u64 {
        self.generation
    }

    pub(crate) const fn is_in_progress(&self) -> bool {
        !matches!(self.stage, ExchangeStage::Idle)
    }

    /// Time limit of the step in progress.
    pub(crate) const fn deadline(&self) -> Instant {
        self.until
    }

    const fn is_computing(&self) -> bool {
        matches!(self.stage, ExchangeStage::Computing)
    }

    /// Begins another exchange, with the secrets as they are now.
    pub(crate) fn restart(
        &mut self,
        now: Instant,
        options: &Options,
        concatenation: Concatenation,
        link: ExchangeLink<'_>,
    ) -> Result<(), QueueConnectError> {
        self.generation = self.settings.generation();
        self.concatenation = concatenation;
        let config = host_config(options, &self.settings, concatenation);
        self.host.set_config(config).map_err(|error| QueueConnectError::fatal(error.into()))?;
        self.start(now, link)
    }

    /// Begins an exchange.
    pub(crate) fn start(
        &mut self,
        now: Instant,
        link: ExchangeLink<'_>,
    ) -> Result<(), QueueConnectError> {
        let randomness = self.settings.randomness().map_err(|why| {
            QueueConnectError::retryable(format!("random numbers for a challenge: {why}"))
        })?;
        // The result of an exchange that was abandoned is not taken for one of this exchange: its number
        // is another one.
        let negotiate = self.host.start(randomness);
        self.send(now, &negotiate, NextStage::Receive, link)
    }

    /// Handles the result of a computation, and the time limit.
    pub(crate) fn poll(&mut self, now: Instant, link: ExchangeLink<'_>) -> ExchangeResult {
        if self.is_computing()
            && let Some(Some(result)) = self.computed.take()
            && let Some(step) = self.host.handle_dh_result(result)
        {
            return self.handle_step(now, step, link);
        }
        if matches!(self.stage, ExchangeStage::Releasing(_))
            && !link.connection.has_unreleased_memory()
            && let ExchangeStage::Releasing(next) = self.end()
        {
            return self.continue_with(now, next, link);
        }
        if now < self.until {
            return None;
        }
        let awaited = match self.end() {
            ExchangeStage::Idle => return None,
            ExchangeStage::Sending(NextStage::Failed(error)) => return Some(Err(error)),
            ExchangeStage::Sending(_) => "Authentication Send was not completed",
            ExchangeStage::Releasing(_) => "a message was not sent",
            ExchangeStage::Receiving => "Authentication Receive was not completed",
            ExchangeStage::Computing => "a Diffie-Hellman computation was not completed",
        };
        let within = self.settings.timeout;
        Some(Err(self.retryable(&format!("{awaited} within {within}"))))
    }

    /// Handles the completion of the outstanding command.
    pub(crate) fn handle_completion(
        &mut self,
        now: Instant,
        completion: Completion,
        link: ExchangeLink<'_>,
    ) -> ExchangeResult {
        let status = completion.status();
        match self.end() {
            ExchangeStage::Sending(NextStage::Failed(error)) => Some(Err(error)),
            ExchangeStage::Sending(_) if !status.is_success() => {
                Some(Err(self.refused("Authentication Send", status)))
            }
            ExchangeStage::Sending(next) if link.connection.has_unreleased_memory() => {
                (self.stage, self.until) =
                    (ExchangeStage::Releasing(next), now.after(self.settings.timeout));
                None
            }
            ExchangeStage::Sending(next) => self.continue_with(now, next, link),
            // A message may be shorter than the buffer, whose rest is zero.
            ExchangeStage::Receiving
                if status.is_success() || status == Status::DATA_TRANSFER_ERROR =>
            {
                let mut bytes = [0; CHALLENGE_BUFFER_BYTES];
                // The memory belongs to this exchange.
                let _ = link.memory.load(self.buffer.segment, &mut bytes);
                let step = self.host.handle_message(&bytes);
                self.handle_step(now, step, link)
            }
            ExchangeStage::Receiving => Some(Err(self.refused("Authentication Receive", status))),
            ExchangeStage::Idle | ExchangeStage::Releasing(_) | ExchangeStage::Computing => {
                Some(Err(self.retryable("a completion was received without a command")))
            }
        }
    }

    /// Gives the exchange up with its connection.
    pub(crate) fn retire(self, connection: Box<QueueConnection>) {
        self.buffer.retire(connection);
    }

    /// The buffer of an exchange that is given up.
    pub(crate) fn into_buffer(self) -> ExchangeBuffer {
        self.buffer
    }

    /// Whether a computation or a release is awaited, of which no thread is woken.
    pub(crate) const fn needs_polling(&self) -> bool {
        matches!(self.stage, ExchangeStage::Computing | ExchangeStage::Releasing(_))
    }

    /// Continues once a message was sent, and its buffer can be used again.
    fn continue_with(
        &mut self,
        now: Instant,
        next: NextStage,
        link: ExchangeLink<'_>,
    ) -> ExchangeResult {
        match next {
            NextStage::Receive => self.receive(now, link).err().map(Err),
            NextStage::Authenticated(outcome) => Some(Ok(outcome)),
            NextStage::Failed(error) => Some(Err(error)),
        }
    }

    /// Takes the failure of which the controller is being informed, because the connection is lost.
    pub(crate) fn take_failure(&mut self) -> Option<QueueConnectError> {
        match self.end() {
            ExchangeStage::Sending(NextStage::Failed(error)) => Some(error),
            _ => None,
        }
    }

    fn end(&mut self) -> ExchangeStage {
        self.until = Instant::NEVER;
        core::mem::replace(&mut self.stage, ExchangeStage::Idle)
    }

    fn handle_step(&mut self, now: Instant, step: Step, link: ExchangeLink<'_>) -> ExchangeResult {
        let sent = match step {
            Step::Compute(job) => {
                let computed = Arc::clone(&self.computed);
                let done = move |result| computed.send(|slot| *slot = Some(result));
                (self.stage, self.until) =
                    (ExchangeStage::Computing, now.after(self.settings.timeout));
                self.settings.executor.execute(job, Box::new(done));
                return None;
            }
            Step::Message(message) => self.send(now, &message, NextStage::Receive, link),
            Step::Authenticated { message: None, outcome } => {
                self.end();
                return Some(Ok(Box::new(outcome)));
            }
            Step::Authenticated { message: Some(message), outcome } => {
                self.send(now, &message, NextStage::Authenticated(Box::new(outcome)), link)
            }
            Step::Failed { message, failure } => {
                let is_fatal = is_fatal(failure.reason);
                let are_secrets_refused = failure.reason == FailureReason::AuthenticationFailed;
                let error = Error::from(failure).with_context(self.subject());
                let error = QueueConnectError { error, is_fatal, are_secrets_refused };
                let Some(message) = message else {
                    self.end();
                    return Some(Err(error));
                };
                self.send(now, &message, NextStage::Failed(error), link)
            }
        };
        sent.err().map(Err)
    }

    fn send(
        &mut self,
        now: Instant,
        message: &[u8],
        next: NextStage,
        link: ExchangeLink<'_>,
    ) -> Result<(), QueueConnectError> {
        let tl = u32::try_from(message.len()).unwrap_or(u32::MAX);
        let segment = self.buffer.segment.slice(0, tl);
        let stored =
            segment.filter(|segment| link.memory.store(*segment, message).is_ok()).ok_or_else(
                || self.retryable(&format!("a message of {tl} bytes has no space in its buffer")),
            )?;
        let (spsp0, spsp1) = (SECURITY_PROTOCOL_SPECIFIC, SECURITY_PROTOCOL_SPECIFIC);
        let send = AuthenticationSend { spsp0, spsp1, secp: SECURITY_PROTOCOL, tl };
        self.submit(link, &send.to_command(), DataDirection::FromHost(tl), stored)?;
        (self.stage, self.until) = (ExchangeStage::Sending(next), now.after(self.settings.timeout));
        Ok(())
    }

    fn receive(&mut self, now: Instant, link: ExchangeLink<'_>) -> Result<(), QueueConnectError> {
        let segment = self.buffer.segment;
        // What a short message does not cover is zero, and not the message before it.
        let _ = link.memory.fill(segment, 0);
        let (spsp0, spsp1) = (SECURITY_PROTOCOL_SPECIFIC, SECURITY_PROTOCOL_SPECIFIC);
        let receive =
            AuthenticationReceive { spsp0, spsp1, secp: SECURITY_PROTOCOL, al: BUFFER_BYTES };
        let direction = DataDirection::ToHost(BUFFER_BYTES);
        self.submit(link, &receive.to_command(), direction, segment)?;
        (self.stage, self.until) = (ExchangeStage::Receiving, now.after(self.settings.timeout));
        Ok(())
    }

    fn submit(
        &self,
        link: ExchangeLink<'_>,
        command: &Command,
        direction: DataDirection,
        segment: Segment,
    ) -> Result<(), QueueConnectError> {
        let command = command.with_cid(self.cid);
        let submitted = link.connection.submit_segment(&command, direction, segment);
        submitted.map_err(|_| self.retryable("the connection accepts no command"))?;
        link.connection.send(&mut |_| {});
        Ok(())
    }

    fn refused(&self, command: &str, status: Status) -> QueueConnectError {
        let error = self.retryable(&format!("{command} was refused: {status}"));
        QueueConnectError { is_fatal: status.dnr(), ..error }
    }

    fn retryable(&self, problem: &str) -> QueueConnectError {
        QueueConnectError::retryable(format!("{}: {problem}", self.subject()))
    }

    fn subject(&self) -> String {
        format!("authenticate {}", self.names)
    }
}

fn host_config(
    options: &Options,
    settings: &Authentication,
    concatenation: Concatenation,
) -> HostConfig {
    let secrets = settings.secrets();
    HostConfig {
        host_nqn: options.host.clone(),
        subsystem_nqn: options.subsystem.clone(),
        host_secret: secrets.host,
        controller_secrets: secrets.controller,
        concatenation,
        policy: settings.policy.clone(),
    }
}

/// Whether another exchange would fail as well: the configurations of both ends do not match. A message
/// that is not valid may have been damaged or injected.
const fn is_fatal(reason: FailureReason) -> bool {
    match reason {
        FailureReason::AuthenticationFailed
        | FailureReason::ProtocolNotUsable
        | FailureReason::ConcatenationMismatch
        | FailureReason::HashNotUsable
        | FailureReason::GroupNotUsable => true,
        FailureReason::IncorrectPayload
        | FailureReason::IncorrectMessage
        | FailureReason::Other(_) => false,
    }
}

/// What is known of a queue when its Connect has succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ConnectSecurity {
    pub(crate) is_admin_queue: bool,
    /// The connection has a secure channel.
    pub(crate) is_secure: bool,
    /// The key of its secure channel was generated by an authentication of both ends.
    pub(crate) has_generated_key: bool,
    /// The authentication is to generate a key.
    pub(crate) concatenation: Concatenation,
}

impl ConnectSecurity {
    /// Whether a queue is to be authenticated, or why its connection is not usable: a host never does with
    /// less than its user has asked for, and a controller may require more.
    pub(crate) fn requires_authentication(
        self,
        connected: Connected,
        options: &Options,
    ) -> Result<bool, QueueConnectError> {
        let Self { is_admin_queue, is_secure, has_generated_key, concatenation } = self;
        let is_requested =
            connected.authentication_required() || connected.secure_channel_required();
        let fatal = |text: String, hint: &str| {
            Err(QueueConnectError::fatal(Error::remote(text).with_hint(hint)))
        };
        let (host, subsystem) = (&options.host, &options.subsystem);
        if connected.secure_channel_required() && !is_secure && !concatenation.generates_psk() {
            let found = match options.secure_channel {
                SecureChannelMode::Off => "TLS is off",
                SecureChannelMode::Required | SecureChannelMode::Concatenate => {
                    "the connection is plaintext"
                }
            };
            return fatal(
                format!("the controller of {subsystem} requires a TLS connection, and {found}"),
                "give tls=concatenate with dhchap=NAME, or tls=required with key=NAME",
            );
        }
        let Some(settings) = &options.authentication else {
            if !is_requested {
                return Ok(false);
            }
            return fatal(
                format!(
                    "the controller of {subsystem} requires authentication (DH-HMAC-CHAP), and \
                     {host} has no secret"
                ),
                "give the secret of this host by dhchap=NAME",
            );
        };
        if is_requested || !is_admin_queue {
            return Ok(is_requested);
        }
        if concatenation.generates_psk() {
            return fatal(
                format!(
                    "the controller of {subsystem} does not request authentication, expected it to \
                     agree on a TLS key (secure channel concatenation)"
                ),
                "configure the secret of this host at the target, and check that nothing on the path \
                 alters the connection",
            );
        }
        // A key of both ends proves the identity of both.
        if settings.is_bidirectional() && !has_generated_key {
            return fatal(
                format!(
                    "the controller of {subsystem} does not request authentication, expected it to \
                     prove that it has its secret"
                ),
                "configure the secrets of host and controller at the target, and check that nothing \
                 on the path alters the connection; without dhchap-controller the controller need not prove \
                 anything",
            );
        }
        Ok(false)
    }
}
