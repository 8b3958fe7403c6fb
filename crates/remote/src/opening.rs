//! Opening a queue: a stream, ICReq, Connect, one after the other, in time or not at all.

use core::fmt;

use base::{Instant, Segment, Span};
use dma::DevicePool;
use tcp::{Data, HostConfig, Patience};
use wire::fabrics::{Connect, ConnectData, Connected, InvalidParameter};
use wire::{Completion, Status, Typed};

use crate::dial::{Dial, Dialled};
use crate::exchange::{Exchange, Lost};
use crate::options::Options;

/// A queue that is being opened.
pub(crate) struct Opening {
    stage: Stage,
    plan: Plan,
    until: Instant,
}

/// What queue it is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// 0 is the admin queue.
    pub(crate) queue: u16,
    /// Commands that it has to take.
    pub(crate) depth: u16,
    /// The most data in a capsule.
    pub(crate) in_capsule_bytes: u32,
    /// Where the data of Connect lie.
    pub(crate) data: Segment,
}

/// Named after what is awaited.
enum Stage {
    Stream(Box<dyn Dialled>),
    Opened(Box<Exchange>),
    Answer(Box<Exchange>),
    Nothing,
}

/// A queue that is open.
pub(crate) struct Opened {
    pub(crate) exchange: Box<Exchange>,
    /// The controller's identifier.
    pub(crate) cntlid: u16,
}

/// Why a queue was not opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NotOpened {
    pub(crate) why: String,
    /// It would be the same the next time.
    pub(crate) is_final: bool,
}

/// Bytes of the data of Connect.
pub(crate) const CONNECT_BYTES: u32 = 1024;

/// How often one looks for a stream, and for an answer.
const STREAM_PAUSE: Span = Span::from_ms(1);
const ANSWER_PAUSE: Span = Span::from_us(100);

/// How long a unit may take on its way, and a peer that has been told that this is the end.
const UNIT: Span = Span::from_secs(5);
const LINGER: Span = Span::from_secs(1);

impl Opening {
    /// Begins. The data of Connect lie where `plan` says.
    pub(crate) fn begin(dial: &mut dyn Dial, options: &Options, plan: Plan, now: Instant) -> Self {
        let until = now.after(options.policy.connect);
        Self { stage: Stage::Stream(dial.dial(now, until)), plan, until }
    }

    /// Goes on as far as it can.
    pub(crate) fn turn(
        &mut self,
        now: Instant,
        options: &Options,
        memory: &DevicePool,
    ) -> Option<Result<Opened, NotOpened>> {
        if let Stage::Stream(dialled) = &mut self.stage {
            match dialled.poll(now) {
                Some(Ok(stream)) => {
                    let config = self.config(options);
                    let exchange = Exchange::new(stream, config, memory.clone(), now);
                    self.stage = Stage::Opened(Box::new(exchange));
                }
                Some(Err(broken)) => return self.end(Err(again(broken.to_string()))),
                None => {}
            }
        }
        let mut answer = None;
        if let Stage::Opened(exchange) | Stage::Answer(exchange) = &mut self.stage {
            exchange.send(&mut |_| {});
            exchange.receive(now, &mut |answered| answer = Some(answered.completion));
            exchange.expire(now);
            if let Some(lost) = exchange.lost() {
                let problem = not_opened(lost);
                return self.end(Err(problem));
            }
        }
        if matches!(&self.stage, Stage::Opened(exchange) if exchange.is_open()) {
            self.connect(options);
        }
        if let Some(completion) = answer {
            let connected = connected(self.plan.queue, completion);
            return self.end(connected);
        }
        if now >= self.until {
            let what = match self.stage {
                Stage::Stream(_) => "no stream was opened",
                Stage::Opened(_) => "the connection was not opened (ICReq)",
                Stage::Answer(_) | Stage::Nothing => "Connect was not answered",
            };
            let within = options.policy.connect;
            return self.end(Err(again(format!("{what} within {within}"))));
        }
        None
    }

    fn config(&self, options: &Options) -> HostConfig {
        let patience = Patience { opening: options.policy.connect, unit: UNIT, linger: LINGER };
        HostConfig {
            // A queue has a tag of its own behind those of the ring; the admin queue's is counted in.
            depth: self.plan.depth + u16::from(self.plan.queue > 0),
            in_capsule_bytes: self.plan.in_capsule_bytes,
            header_digest: options.header_digest,
            data_digest: options.data_digest,
            patience,
            ..HostConfig::default()
        }
    }

    fn connect(&mut self, options: &Options) {
        let Stage::Opened(mut exchange) = core::mem::replace(&mut self.stage, Stage::Nothing)
        else {
            return;
        };
        let Plan { queue, depth, data, .. } = self.plan;
        let kato = options.policy.detect.ns / 1_000_000;
        let command = Connect {
            qid: queue,
            // One entry is never used, so the number of commands is that of the last entry.
            sqsize: depth,
            disable_sq_flow_control: true,
            kato: if queue == 0 { u32::try_from(kato).unwrap_or(u32::MAX) } else { 0 },
            ..Connect::default()
        };
        let names = (depth - 1, depth - 1);
        let carried = Data::FromHost(data.len_bytes);
        // The connection has just been opened: there is room for one command.
        let _ = exchange.submit(names, &command.to_command(), carried, Some(data));
        exchange.send(&mut |_| {});
        self.stage = Stage::Answer(exchange);
    }

    fn end(&mut self, result: Result<u16, NotOpened>) -> Option<Result<Opened, NotOpened>> {
        let stage = core::mem::replace(&mut self.stage, Stage::Nothing);
        Some(match (result, stage) {
            (Ok(cntlid), Stage::Answer(exchange)) => Ok(Opened { exchange, cntlid }),
            (Ok(_), _) => Err(again("an answer came before Connect was sent".to_owned())),
            (Err(problem), _) => Err(problem),
        })
    }

    /// When to turn even if nothing comes. It is a matter of a few turns, so its streams wake nobody.
    pub(crate) fn wake_at(&self, now: Instant) -> Instant {
        let pause =
            if matches!(self.stage, Stage::Stream(_)) { STREAM_PAUSE } else { ANSWER_PAUSE };
        now.after(pause).min(self.until)
    }
}

/// Stores the data of Connect, for controller `cntlid` or for any.
pub(crate) fn store_connect_data(
    memory: &DevicePool,
    place: Segment,
    options: &Options,
    cntlid: u16,
) {
    use base::Memory as _;
    let data: ConnectData = options.connect_data(cntlid);
    // It was allocated for this.
    let _ = memory.store(place, data.as_bytes());
}

/// What the answer to a Connect of this queue says: the controller's identifier.
fn connected(queue: u16, completion: Completion) -> Result<u16, NotOpened> {
    let status = completion.status();
    if status.is_success() {
        let answer = Connected(completion.dw0());
        if answer.authentication_required() || answer.secure_channel_required() {
            let why = "the controller requires in-band authentication, expected none".to_owned();
            return Err(NotOpened { why, is_final: true });
        }
        return Ok(answer.cntlid());
    }
    let why = format!("Connect was refused: {}", refusal(status, completion.dw0()));
    let is_final = status.dnr() && (queue == 0 || !has_gone(status, completion.dw0()));
    Err(NotOpened { why, is_final })
}

/// Whether the controller that the admin queue has is not there any more: the target was begun anew, or
/// its address has moved. It will be so each time, and all is well with the next controller.
fn has_gone(status: Status, result: u32) -> bool {
    let what = InvalidParameter(result);
    let is_controller = what.in_data() && what.ipo() == CNTLID_OFFSET;
    status.is(Status::CONNECT_INVALID_PARAMETERS) && is_controller
}

/// Where the data of Connect have the controller's identifier.
const CNTLID_OFFSET: u16 = 16;

/// What a refused Connect means (Base 2.1 §6.3): these codes mean something else elsewhere.
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

/// What lies at an offset of the data of Connect.
fn meaning(offset: u16, in_data: bool) -> &'static str {
    match offset {
        256 if in_data => ": there is no such subsystem",
        512 if in_data => ": the host's name",
        CNTLID_OFFSET if in_data => ": there is no such controller",
        _ => "",
    }
}

fn not_opened(lost: &Lost) -> NotOpened {
    again(lost.to_string())
}

const fn again(why: String) -> NotOpened {
    NotOpened { why, is_final: false }
}

impl fmt::Display for NotOpened {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.why)
    }
}
