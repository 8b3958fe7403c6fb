//! Connects a queue: opens a stream, exchanges ICReq and ICResp, and sends Connect, within a timeout. Then it
//! is authenticated, if the controller requests that.

use core::fmt;
use std::sync::Arc;

use tenmil_base::{Error, Instant, Segment, Span, Stream};
use tenmil_dma::DevicePool;
use tenmil_nvme_auth::{Authenticated, Concatenation};
use tenmil_nvme_tcp::{DataDirection, HostConfig, Timeouts};
use tenmil_wire::fabrics::{Connect, ConnectData, Connected, InvalidParameter};
use tenmil_wire::{Completion, Status, TypedCommand};

use crate::connector::{Connector, PendingConnect};
use crate::options::Options;
use crate::queue_authentication::{
    ConnectSecurity, ExchangeBuffers, ExchangeLink, QueueAuthentication,
};
use crate::queue_connection::QueueConnection;

/// A queue connect in progress.
pub(crate) struct QueueConnect {
    stage: ConnectStage,
    params: QueueConnectParams,
    until: Instant,
}

/// Parameters of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueConnectParams {
    /// Queue ID; 0 is the admin queue.
    pub(crate) queue: u16,
    /// Number of commands that it has to accept.
    pub(crate) depth: u16,
    /// Maximum in-capsule data size.
    pub(crate) in_capsule_bytes: u32,
    /// Location of the Connect data.
    pub(crate) data: Segment,
    /// What secures the connection.
    pub(crate) security: ChannelSecurity,
}

/// What secures the connection of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChannelSecurity {
    /// The stream may be plaintext or not.
    Any,
    /// The stream has to be a secure channel.
    SecureChannel,
    /// The stream has to be a secure channel, with the key that an authentication has generated.
    GeneratedKey,
    /// The stream is plaintext, and the authentication over it generates the key of other connections.
    GeneratesKey,
}

/// Stage of a connect, named for what it awaits.
enum ConnectStage {
    Stream(Box<dyn PendingConnect>),
    IcResp(Box<QueueConnection>),
    ConnectCompletion(Box<QueueConnection>),
    Authentication(Box<AuthenticatingQueue>),
    Nothing,
}

/// A queue that is connected, and is being authenticated.
struct AuthenticatingQueue {
    /// Both are there until the end.
    exchange: Option<(Box<QueueConnection>, QueueAuthentication)>,
    cntlid: u16,
}

/// A connected queue.
pub(crate) struct ConnectedQueue {
    pub(crate) connection: Box<QueueConnection>,
    /// Controller identifier (CNTLID).
    pub(crate) cntlid: u16,
    /// Its authentication and the result, if it was authenticated.
    pub(crate) authentication: Option<(QueueAuthentication, Box<Authenticated>)>,
}

/// Why a queue was not connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QueueConnectError {
    pub(crate) error: Error,
    /// A retry would fail as well.
    pub(crate) is_fatal: bool,
    /// One of the ends has refused the secrets of the other.
    pub(crate) are_secrets_refused: bool,
}

/// Size of the Connect data in bytes.
pub(crate) const CONNECT_BYTES: u32 = 1024;

/// Poll intervals while a stream and a completion are awaited.
const STREAM_POLL_INTERVAL: Span = Span::from_ms(1);
const COMPLETION_POLL_INTERVAL: Span = Span::from_us(100);

/// Maximum time of one PDU, and of closing after a termination request.
const PDU_TIMEOUT: Span = Span::from_secs(5);
const CLOSE_TIMEOUT: Span = Span::from_secs(1);

impl QueueConnect {
    /// Starts a connect. The Connect data is at `params.data`.
    pub(crate) fn begin(
        connector: &mut dyn Connector,
        options: &Options,
        params: QueueConnectParams,
        now: Instant,
    ) -> Self {
        let until = now.after(options.policy.connect);
        Self { stage: ConnectStage::Stream(connector.begin_connect(now, until)), params, until }
    }

    /// Advances the connect as far as possible.
    pub(crate) fn poll(
        &mut self,
        now: Instant,
        options: &Options,
        memory: &DevicePool,
        buffers: &Arc<ExchangeBuffers>,
    ) -> Option<Result<ConnectedQueue, QueueConnectError>> {
        if let ConnectStage::Stream(pending) = &mut self.stage {
            let opened = pending.poll(now);
            if let Some(until) = pending.handshake_deadline() {
                self.until = until;
            }
            match opened {
                Some(Ok(stream)) => {
                    if let Err(error) = self.check_stream(&*stream) {
                        return self.end_connect(Err(error));
                    }
                    if stream.secure_channel().is_some() {
                        self.until = now.after(options.policy.connect);
                    }
                    let config = self.host_config(options);
                    let connection = QueueConnection::new(stream, config, memory.clone(), now);
                    self.stage = ConnectStage::IcResp(Box::new(connection));
                }
                Some(Err(broken)) => {
                    return self.end_connect(Err(QueueConnectError::retryable(broken)));
                }
                None => {}
            }
        }
        if let ConnectStage::Authentication(_) = &self.stage {
            return self.poll_authentication(now, memory);
        }
        let mut completion = None;
        if let ConnectStage::IcResp(connection) | ConnectStage::ConnectCompletion(connection) =
            &mut self.stage
        {
            connection.send(&mut |_| {});
            connection.receive(now, &mut |command| completion = Some(command.completion));
            connection.check_timeouts(now);
            if let Some(lost) = connection.loss() {
                let problem = QueueConnectError::retryable(lost);
                return self.end_connect(Err(problem));
            }
        }
        if matches!(&self.stage, ConnectStage::IcResp(connection) if connection.is_open()) {
            self.send_connect(options);
        }
        if let Some(completion) = completion {
            return self.handle_connect_completion(now, completion, options, memory, buffers);
        }
        if now >= self.until {
            let found = match self.stage {
                ConnectStage::Stream(_) => "no stream was opened",
                ConnectStage::IcResp(_) => "the connection was not opened (ICReq)",
                ConnectStage::ConnectCompletion(_)
                | ConnectStage::Authentication(_)
                | ConnectStage::Nothing => "Connect was not completed",
            };
            let within = options.policy.connect;
            let error = QueueConnectError::retryable(format!("{found} within {within}"));
            return self.end_connect(Err(error));
        }
        None
    }

    fn host_config(&self, options: &Options) -> HostConfig {
        let timeouts =
            Timeouts { connect: options.policy.connect, pdu: PDU_TIMEOUT, close: CLOSE_TIMEOUT };
        HostConfig {
            // An I/O queue has an additional tag after those of the ring; for the admin queue it is
            // included.
            depth: self.params.depth + u16::from(self.params.queue > 0),
            cid_mask: tenmil_nvme_host::slot_mask(self.params.depth),
            in_capsule_bytes: self.params.in_capsule_bytes,
            header_digest: options.header_digest,
            data_digest: options.data_digest,
            timeouts,
            ..HostConfig::default()
        }
    }

    fn send_connect(&mut self, options: &Options) {
        let ConnectStage::IcResp(mut connection) =
            core::mem::replace(&mut self.stage, ConnectStage::Nothing)
        else {
            return;
        };
        let QueueConnectParams { queue, depth, data, .. } = self.params;
        let kato = options.policy.detect.ns / 1_000_000;
        let command = Connect {
            qid: queue,
            // SQSIZE is zero-based, and one entry is never used, so it equals the number of commands.
            sqsize: depth,
            disable_sq_flow_control: true,
            kato: if queue == 0 { u32::try_from(kato).unwrap_or(u32::MAX) } else { 0 },
            ..Connect::default()
        };
        let command = command.to_command().with_cid(depth - 1);
        let data_direction = DataDirection::FromHost(data.len_bytes);
        let submitted = connection.submit_segment(&command, data_direction, data);
        assert!(submitted.is_ok(), "a connection that was just opened has space for one command");
        connection.send(&mut |_| {});
        self.stage = ConnectStage::ConnectCompletion(connection);
    }

    /// Checks that a stream is at least as secure as required.
    fn check_stream(&self, stream: &dyn Stream) -> Result<(), QueueConnectError> {
        let is_required = match self.params.security {
            ChannelSecurity::Any | ChannelSecurity::GeneratesKey => false,
            ChannelSecurity::SecureChannel | ChannelSecurity::GeneratedKey => true,
        };
        if is_required && stream.secure_channel().is_none() {
            let error = Error::remote("the connection is plaintext, expected TLS");
            return Err(QueueConnectError::fatal(error));
        }
        Ok(())
    }

    /// Handles the completion of Connect: the queue is connected, or has to be authenticated.
    fn handle_connect_completion(
        &mut self,
        now: Instant,
        completion: Completion,
        options: &Options,
        memory: &DevicePool,
        buffers: &Arc<ExchangeBuffers>,
    ) -> Option<Result<ConnectedQueue, QueueConnectError>> {
        let QueueConnectParams { queue, depth, security, .. } = self.params;
        let connected = match connect_result(queue, completion) {
            Ok(connected) => connected,
            Err(error) => return self.end_connect(Err(error)),
        };
        let ConnectStage::ConnectCompletion(mut connection) =
            core::mem::replace(&mut self.stage, ConnectStage::Nothing)
        else {
            let problem = "a completion was received before Connect was sent";
            return self.end_connect(Err(QueueConnectError::retryable(problem)));
        };
        let cntlid = connected.cntlid();
        let concatenation = match security {
            ChannelSecurity::GeneratesKey => Concatenation::NewTlsPsk,
            _ => Concatenation::None,
        };
        let known = ConnectSecurity {
            is_admin_queue: queue == 0,
            is_secure: connection.secure_channel().is_some(),
            has_generated_key: security == ChannelSecurity::GeneratedKey,
            concatenation,
        };
        match (known.requires_authentication(connected, options), &options.authentication) {
            (Err(error), _) => Some(Err(error)),
            (Ok(true), Some(settings)) => {
                let Some(buffer) = buffers.allocate() else {
                    let problem = "authenticate a queue: no memory is left for its messages";
                    return Some(Err(QueueConnectError::retryable(problem)));
                };
                let exchange = (depth - 1, buffer);
                let created = QueueAuthentication::new(options, settings, exchange, concatenation);
                let mut authentication = match created {
                    Ok(authentication) => authentication,
                    Err(error) => return Some(Err(error)),
                };
                let link = ExchangeLink { connection: &mut connection, memory };
                let started = authentication.start(now, link);
                let exchange = Some((connection, authentication));
                let queue = Box::new(AuthenticatingQueue { exchange, cntlid });
                self.stage = ConnectStage::Authentication(queue);
                started.err().and_then(|error| self.end_connect(Err(error)))
            }
            (Ok(_), _) => Some(Ok(ConnectedQueue { connection, cntlid, authentication: None })),
        }
    }

    /// Advances the authentication.
    fn poll_authentication(
        &mut self,
        now: Instant,
        memory: &DevicePool,
    ) -> Option<Result<ConnectedQueue, QueueConnectError>> {
        let ConnectStage::Authentication(queue) = &mut self.stage else { return None };
        let Some((connection, authentication)) = &mut queue.exchange else { return None };
        let mut completion = None;
        connection.send(&mut |_| {});
        connection.receive(now, &mut |command| completion = Some(command.completion));
        connection.check_timeouts(now);
        let mut result = completion.and_then(|completion| {
            authentication.handle_completion(now, completion, ExchangeLink { connection, memory })
        });
        if result.is_none() {
            result = match connection.loss() {
                // A controller may close the connection as soon as it knows that the exchange has failed.
                Some(lost) => {
                    let lost = QueueConnectError::retryable(lost);
                    Some(Err(authentication.take_failure().unwrap_or(lost)))
                }
                None => authentication.poll(now, ExchangeLink { connection, memory }),
            };
        }
        let connected = match result? {
            Ok(outcome) => {
                let (connection, authentication) = queue.exchange.take()?;
                let authentication = Some((authentication, outcome));
                Ok(ConnectedQueue { connection, cntlid: queue.cntlid, authentication })
            }
            Err(error) => Err(error),
        };
        self.end_connect(connected)
    }

    fn end_connect(
        &mut self,
        result: Result<ConnectedQueue, QueueConnectError>,
    ) -> Option<Result<ConnectedQueue, QueueConnectError>> {
        self.stage = ConnectStage::Nothing;
        Some(result)
    }

    /// Latest time of the next call of `poll`. A connect takes only a few iterations, so its streams have
    /// no wake source.
    pub(crate) fn wake_at(&self, now: Instant) -> Instant {
        let pause = if matches!(self.stage, ConnectStage::Stream(_)) {
            STREAM_POLL_INTERVAL
        } else {
            COMPLETION_POLL_INTERVAL
        };
        let until = match &self.stage {
            ConnectStage::Authentication(queue) => {
                let exchange = queue.exchange.as_ref();
                exchange.map_or(Instant::NEVER, |(_, authentication)| authentication.deadline())
            }
            _ => self.until,
        };
        now.after(pause).min(until)
    }
}

impl Drop for AuthenticatingQueue {
    /// The socket may still send from the buffer of an exchange that is given up.
    fn drop(&mut self) {
        if let Some((connection, authentication)) = self.exchange.take() {
            authentication.retire(connection);
        }
    }
}

impl QueueConnectError {
    /// An error after which a retry may succeed.
    pub(crate) fn retryable(why: impl fmt::Display) -> Self {
        Self { error: Error::remote(why), is_fatal: false, are_secrets_refused: false }
    }

    /// An error that each retry would meet again.
    pub(crate) const fn fatal(error: Error) -> Self {
        Self { error, is_fatal: true, are_secrets_refused: false }
    }
}

/// Stores the Connect data, for controller `cntlid` or for any.
pub(crate) fn store_connect_data(
    memory: &DevicePool,
    segment: Segment,
    options: &Options,
    cntlid: u16,
) {
    use tenmil_base::Memory as _;
    let data: ConnectData = options.connect_data(cntlid);
    let stored = memory.store(segment, data.as_bytes());
    assert!(stored.is_ok(), "the memory was allocated for this");
}

/// The result of a Connect on this queue.
fn connect_result(queue: u16, completion: Completion) -> Result<Connected, QueueConnectError> {
    let status = completion.status();
    if status.is_success() {
        return Ok(Connected(completion.dw0()));
    }
    let why = format!("Connect was refused: {}", rejection_reason(status, completion.dw0()));
    let is_fatal = status.dnr() && (queue == 0 || !is_controller_missing(status, completion.dw0()));
    Err(QueueConnectError { is_fatal, ..QueueConnectError::retryable(why) })
}

/// Whether the controller of the admin queue does not exist any more: the target was restarted, or its
/// address has moved. Every retry with it fails, and a new controller works.
fn is_controller_missing(status: Status, result: u32) -> bool {
    let found = InvalidParameter(result);
    let is_controller = found.in_data() && found.ipo() == CNTLID_OFFSET;
    status.has_same_code_as(Status::CONNECT_INVALID_PARAMETERS) && is_controller
}

/// Offset of the controller identifier in the Connect data.
const CNTLID_OFFSET: u16 = 16;

/// Meaning of the status of a rejected Connect (NVM Express Base 2.1, section 6.3). These codes have
/// other meanings for other commands.
fn rejection_reason(status: Status, result: u32) -> String {
    let known = [
        (
            Status::CONNECT_INCOMPATIBLE_FORMAT,
            "the controller does not support the format of its data",
        ),
        (Status::CONNECT_CONTROLLER_BUSY, "the controller has a host already"),
        (Status::CONNECT_RESTART_DISCOVERY, "the subsystem has moved: discover it again"),
        (Status::CONNECT_INVALID_HOST, "this host may not connect to that subsystem"),
    ];
    if status.has_same_code_as(Status::CONNECT_INVALID_PARAMETERS) {
        let found = InvalidParameter(result);
        let (at, of) = (found.ipo(), if found.in_data() { "data" } else { "command" });
        return format!("byte {at} of its {of} is refused{}", field_meaning(at, found.in_data()));
    }
    let known = known.iter().find(|(code, _)| status.has_same_code_as(*code));
    known.map_or_else(|| status.to_string(), |(_, field_meaning)| (*field_meaning).to_owned())
}

/// Meaning of the field at an offset of the Connect data.
fn field_meaning(offset: u16, in_data: bool) -> &'static str {
    match offset {
        256 if in_data => ": there is no such subsystem",
        512 if in_data => ": the host's name",
        CNTLID_OFFSET if in_data => ": there is no such controller",
        _ => "",
    }
}
