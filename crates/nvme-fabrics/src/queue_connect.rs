//! Connects a queue: opens a stream, exchanges ICReq and ICResp, and sends Connect, within a timeout.

use core::fmt;

use tenmil_base::{Instant, Segment, Span};
use tenmil_dma::DevicePool;
use tenmil_nvme_tcp::{DataDirection, HostConfig, Timeouts};
use tenmil_wire::fabrics::{Connect, ConnectData, Connected, InvalidParameter};
use tenmil_wire::{Completion, Status, TypedCommand};

use crate::connector::{Connector, PendingConnect};
use crate::options::Options;
use crate::queue_connection::{ConnectionLoss, QueueConnection};

/// A queue connect in progress.
pub(crate) struct QueueConnect {
    stage: ConnectStage,
    plan: QueueConnectParams,
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
}

/// Stage of a connect, named for what it awaits.
enum ConnectStage {
    Stream(Box<dyn PendingConnect>),
    Opened(Box<QueueConnection>),
    Answer(Box<QueueConnection>),
    Nothing,
}

/// A connected queue.
pub(crate) struct ConnectedQueue {
    pub(crate) exchange: Box<QueueConnection>,
    /// Controller identifier (CNTLID).
    pub(crate) cntlid: u16,
}

/// Why a queue was not connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QueueConnectError {
    pub(crate) why: String,
    /// A retry would fail as well.
    pub(crate) is_fatal: bool,
}

/// Size of the Connect data in bytes.
pub(crate) const CONNECT_BYTES: u32 = 1024;

/// Poll intervals while a stream and a completion are awaited.
const STREAM_PAUSE: Span = Span::from_ms(1);
const ANSWER_PAUSE: Span = Span::from_us(100);

/// Maximum time of one PDU, and of closing after a termination request.
const UNIT: Span = Span::from_secs(5);
const LINGER: Span = Span::from_secs(1);

impl QueueConnect {
    /// Starts a connect. The Connect data is at `plan.data`.
    pub(crate) fn begin(
        dial: &mut dyn Connector,
        options: &Options,
        plan: QueueConnectParams,
        now: Instant,
    ) -> Self {
        let until = now.after(options.policy.connect);
        Self { stage: ConnectStage::Stream(dial.dial(now, until)), plan, until }
    }

    /// Advances the connect as far as possible.
    pub(crate) fn turn(
        &mut self,
        now: Instant,
        options: &Options,
        memory: &DevicePool,
    ) -> Option<Result<ConnectedQueue, QueueConnectError>> {
        if let ConnectStage::Stream(dialled) = &mut self.stage {
            match dialled.poll(now) {
                Some(Ok(stream)) => {
                    let config = self.config(options);
                    let exchange = QueueConnection::new(stream, config, memory.clone(), now);
                    self.stage = ConnectStage::Opened(Box::new(exchange));
                }
                Some(Err(broken)) => return self.end(Err(again(broken.to_string()))),
                None => {}
            }
        }
        let mut answer = None;
        if let ConnectStage::Opened(exchange) | ConnectStage::Answer(exchange) = &mut self.stage {
            exchange.send(&mut |_| {});
            exchange.receive(now, &mut |answered| answer = Some(answered.completion));
            exchange.expire(now);
            if let Some(lost) = exchange.lost() {
                let problem = not_opened(lost);
                return self.end(Err(problem));
            }
        }
        if matches!(&self.stage, ConnectStage::Opened(exchange) if exchange.is_open()) {
            self.connect(options);
        }
        if let Some(completion) = answer {
            let connected = connected(self.plan.queue, completion);
            return self.end(connected);
        }
        if now >= self.until {
            let what = match self.stage {
                ConnectStage::Stream(_) => "no stream was opened",
                ConnectStage::Opened(_) => "the connection was not opened (ICReq)",
                ConnectStage::Answer(_) | ConnectStage::Nothing => "Connect was not answered",
            };
            let within = options.policy.connect;
            return self.end(Err(again(format!("{what} within {within}"))));
        }
        None
    }

    fn config(&self, options: &Options) -> HostConfig {
        let time_limit = Timeouts { opening: options.policy.connect, unit: UNIT, linger: LINGER };
        HostConfig {
            // An I/O queue has an additional tag after those of the ring; for the admin queue it is
            // included.
            depth: self.plan.depth + u16::from(self.plan.queue > 0),
            cid_mask: tenmil_nvme_host::slot_mask(self.plan.depth),
            in_capsule_bytes: self.plan.in_capsule_bytes,
            header_digest: options.header_digest,
            data_digest: options.data_digest,
            time_limit,
            ..HostConfig::default()
        }
    }

    fn connect(&mut self, options: &Options) {
        let ConnectStage::Opened(mut exchange) =
            core::mem::replace(&mut self.stage, ConnectStage::Nothing)
        else {
            return;
        };
        let QueueConnectParams { queue, depth, data, .. } = self.plan;
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
        let carried = DataDirection::FromHost(data.len_bytes);
        let submitted = exchange.submit_segment(&command, carried, data);
        assert!(submitted.is_ok(), "a connection that was just opened has space for one command");
        exchange.send(&mut |_| {});
        self.stage = ConnectStage::Answer(exchange);
    }

    fn end(
        &mut self,
        result: Result<u16, QueueConnectError>,
    ) -> Option<Result<ConnectedQueue, QueueConnectError>> {
        let stage = core::mem::replace(&mut self.stage, ConnectStage::Nothing);
        Some(match (result, stage) {
            (Ok(cntlid), ConnectStage::Answer(exchange)) => Ok(ConnectedQueue { exchange, cntlid }),
            (Ok(_), _) => Err(again("an answer came before Connect was sent".to_owned())),
            (Err(problem), _) => Err(problem),
        })
    }

    /// Latest time of the next call of `turn`. A connect takes only a few iterations, so its streams have
    /// no wake source.
    pub(crate) fn wake_at(&self, now: Instant) -> Instant {
        let pause =
            if matches!(self.stage, ConnectStage::Stream(_)) { STREAM_PAUSE } else { ANSWER_PAUSE };
        now.after(pause).min(self.until)
    }
}

/// Stores the Connect data, for controller `cntlid` or for any.
pub(crate) fn store_connect_data(
    memory: &DevicePool,
    place: Segment,
    options: &Options,
    cntlid: u16,
) {
    use tenmil_base::Memory as _;
    let data: ConnectData = options.connect_data(cntlid);
    let stored = memory.store(place, data.as_bytes());
    assert!(stored.is_ok(), "the memory was allocated for this");
}

/// The result of a Connect on this queue: the controller identifier.
fn connected(queue: u16, completion: Completion) -> Result<u16, QueueConnectError> {
    let status = completion.status();
    if status.is_success() {
        let answer = Connected(completion.dw0());
        if answer.authentication_required() || answer.secure_channel_required() {
            let why = "the controller requires in-band authentication, expected none".to_owned();
            return Err(QueueConnectError { why, is_fatal: true });
        }
        return Ok(answer.cntlid());
    }
    let why = format!("Connect was refused: {}", refusal(status, completion.dw0()));
    let is_final = status.dnr() && (queue == 0 || !has_gone(status, completion.dw0()));
    Err(QueueConnectError { why, is_fatal: is_final })
}

/// Whether the controller of the admin queue does not exist any more: the target was restarted, or its
/// address has moved. Every retry with it fails, and a new controller works.
fn has_gone(status: Status, result: u32) -> bool {
    let what = InvalidParameter(result);
    let is_controller = what.in_data() && what.ipo() == CNTLID_OFFSET;
    status.is(Status::CONNECT_INVALID_PARAMETERS) && is_controller
}

/// Offset of the controller identifier in the Connect data.
const CNTLID_OFFSET: u16 = 16;

/// Meaning of the status of a rejected Connect (NVM Express Base 2.1, section 6.3). These codes have
/// other meanings for other commands.
fn refusal(status: Status, result: u32) -> String {
    let known = [
        (Status::CONNECT_INCOMPATIBLE_FORMAT, "the format of its data is not known there"),
        (Status::CONNECT_CONTROLLER_BUSY, "the controller has a host already"),
        (Status::CONNECT_RESTART_DISCOVERY, "the subsystem is elsewhere: discover it again"),
        (Status::CONNECT_INVALID_HOST, "this host may not connect to that subsystem"),
    ];
    if status.is(Status::CONNECT_INVALID_PARAMETERS) {
        let what = InvalidParameter(result);
        let (at, of) = (what.ipo(), if what.in_data() { "data" } else { "command" });
        return format!("byte {at} of its {of} is refused{}", meaning(at, what.in_data()));
    }
    let known = known.iter().find(|(code, _)| status.is(*code));
    known.map_or_else(|| status.to_string(), |(_, meaning)| (*meaning).to_owned())
}

/// Meaning of the field at an offset of the Connect data.
fn meaning(offset: u16, in_data: bool) -> &'static str {
    match offset {
        256 if in_data => ": there is no such subsystem",
        512 if in_data => ": the host's name",
        CNTLID_OFFSET if in_data => ": there is no such controller",
        _ => "",
    }
}

fn not_opened(lost: &ConnectionLoss) -> QueueConnectError {
    again(lost.to_string())
}

const fn again(why: String) -> QueueConnectError {
    QueueConnectError { why, is_fatal: false }
}

impl fmt::Display for QueueConnectError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.why)
    }
}
