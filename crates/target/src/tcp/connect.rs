//! Connect: who asks for what, and what he is told (Base 2.1 §6.3).

use std::sync::Arc;

use base::{Instant, Span};
use ctrl::controller::HostInUse;
use ctrl::front::fabrics::{FabricsFrontEnd, NoQueue};
use wire::fabrics::{CNTLID_DYNAMIC, Connect, ConnectData, InvalidParameter};
use wire::{Command, Status, Typed, nqn};

use super::association::{Association, HostNames};
use super::offer::NoController;
use super::service::Service;

/// What a host has asked for, and may have.
#[derive(Debug)]
pub(super) enum Granted {
    /// A controller of its own.
    Admin(Arc<Association>),
    /// An I/O queue of a controller that it has.
    Io { association: Arc<Association>, qid: u16 },
    /// A discovery controller, for the host of this name.
    Discovery(String),
}

/// What a host is told that gets nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NotGranted {
    pub(super) status: Status,
    /// Dword 0.
    pub(super) result: u32,
    /// For people.
    pub(super) why: String,
    /// It may be otherwise in a moment: what stands in the way is the host's own, and perhaps going.
    pub(super) may_pass: bool,
}

/// Offsets in the command and in its data (Base 2.1 §6.3).
const RECFMT: u16 = 40;
const QID: u16 = 42;
const SQSIZE: u16 = 44;
const KATO: u16 = 48;
const HOSTID: u16 = 0;
const CNTLID: u16 = 16;
const SUBNQN: u16 = 256;
const HOSTNQN: u16 = 512;

/// Connect and its data, as a service answers it.
pub(super) struct Asked<'a> {
    pub(super) service: &'a Service,
    pub(super) port: u16,
    /// Its address, as its stream says it.
    pub(super) peer: &'a str,
    pub(super) now: Instant,
    pub(super) connect: Connect,
    pub(super) data: &'a ConnectData,
}

impl NotGranted {
    fn new(status: Status, why: impl Into<String>) -> Self {
        Self { status: status.with_dnr(), result: 0, why: why.into(), may_pass: false }
    }

    /// There is nothing left of what it takes; a host may try again.
    pub(super) fn busy(why: &str) -> Self {
        let status = Status::CONNECT_CONTROLLER_BUSY;
        Self { status, ..Self::new(status, why) }
    }

    /// This field of the command cannot be.
    fn command(offset: u16, why: impl Into<String>) -> Self {
        let result = InvalidParameter(0).with(|dword| dword.ipo(offset)).0;
        Self { result, ..Self::new(InvalidParameter::STATUS, why) }
    }

    /// This field of the data cannot be.
    fn data(offset: u16, why: impl Into<String>) -> Self {
        let result = InvalidParameter(0).with(|dword| dword.ipo(offset).in_data(true)).0;
        Self { result, ..Self::new(InvalidParameter::STATUS, why) }
    }
}

/// A Connect that has come.
pub(super) fn parse(command: &Command) -> Result<Connect, NotGranted> {
    let connect = Connect::parse(command)
        .map_err(|status| NotGranted::new(status, "its Connect cannot be read"))?;
    if connect.recfmt != 0 {
        let why = format!("RECFMT is {}, expected 0", connect.recfmt);
        let result = InvalidParameter(0).with(|dword| dword.ipo(RECFMT)).0;
        return Err(NotGranted {
            result,
            ..NotGranted::new(Status::CONNECT_INCOMPATIBLE_FORMAT, why)
        });
    }
    Ok(connect)
}

impl Asked<'_> {
    /// Grants what is asked for, or says why not.
    pub(super) fn answer(&self) -> Result<Granted, NotGranted> {
        let most = self.service.limits().queue_entries;
        let entries = u32::from(self.connect.sqsize) + 1;
        if entries < 2 || entries > most.into() {
            let why = format!("its queue has {entries} entries, expected 2 to {most}");
            return Err(NotGranted::command(SQSIZE, why));
        }
        let host = self.host()?;
        let longest = self.service.limits().admission().keep_alive_max;
        if self.connect.qid == 0 && Span::from_ms(self.connect.kato.into()) > longest {
            let why = format!(
                "its keep-alive time-out is {} ms, expected at most {longest}",
                self.connect.kato
            );
            return Err(NotGranted::command(KATO, why));
        }
        let field = self.data.subnqn();
        if nqn::read(&field.0).is_ok_and(|name| self.service.is_discovery(name)) {
            return self.discovery(host);
        }
        if self.connect.qid == 0 { self.admin(host) } else { self.io(&host) }
    }

    /// An empty HOSTNQN is the name of a host that no list can hold: it gets what any host may have.
    fn host(&self) -> Result<HostNames, NotGranted> {
        let field = self.data.hostnqn();
        let name = match field.0.first() {
            Some(0) => "",
            _ => nqn::read_host(&field.0)
                .map_err(|why| NotGranted::data(HOSTNQN, format!("host {why}")))?,
        };
        // As in feature 81h and in reports: the same sixteen bytes everywhere.
        Ok(HostNames { nqn: name.to_owned(), identifier: u128::from_le_bytes(self.data.hostid()) })
    }

    fn offer(&self) -> Result<Arc<super::offer::Offer>, NotGranted> {
        let field = self.data.subnqn();
        let name = nqn::read(&field.0);
        let name = name.map_err(|why| NotGranted::data(SUBNQN, format!("subsystem {why}")))?;
        self.service.find(name, self.port).ok_or_else(|| {
            NotGranted::data(SUBNQN, format!("it asks for {name}, which is not offered here"))
        })
    }

    /// The discovery service is everybody's, and has no I/O queues (Base 2.1 §3.1.3.3).
    fn discovery(&self, host: HostNames) -> Result<Granted, NotGranted> {
        if self.connect.qid != 0 {
            let why = format!("it asks for queue {} of discovery, expected 0", self.connect.qid);
            return Err(NotGranted::command(QID, why));
        }
        if self.data.cntlid() != CNTLID_DYNAMIC {
            let why = format!("it asks for controller {:#x} of discovery", self.data.cntlid());
            return Err(NotGranted::data(CNTLID, format!("{why}, expected any, 0xffff")));
        }
        Ok(Granted::Discovery(host.nqn))
    }

    fn admin(&self, host: HostNames) -> Result<Granted, NotGranted> {
        let offer = self.offer()?;
        let asked = self.data.cntlid();
        let limits = self.service.limits();
        let opened = offer.open(self.now, asked, (self.port, &host, self.peer), limits);
        let mut controller = opened.map_err(|why| no_controller(why, &host))?;
        let cntlid = controller.configuration().cntlid;
        let kato = controller.set_keep_alive(self.now, self.connect.kato);
        let front = FabricsFrontEnd::new(controller, self.now);
        let association = Association::new(Arc::clone(&offer), cntlid, (host, self.port), front);
        kato.map_err(|_| NotGranted::command(KATO, "its keep-alive time-out is too long"))?;
        offer.enter(&association);
        Ok(Granted::Admin(association))
    }

    fn io(&self, host: &HostNames) -> Result<Granted, NotGranted> {
        let offer = self.offer()?;
        let (cntlid, qid) = (self.data.cntlid(), self.connect.qid);
        let association = offer.association(cntlid).ok_or_else(|| {
            NotGranted::data(CNTLID, format!("it has no controller {cntlid} of {}", offer.nqn()))
        })?;
        association.host.check_queue_of(host, cntlid)?;
        let may_create = association.front().may_create(qid);
        may_create.map_err(no_queue)?;
        Ok(Granted::Io { association, qid })
    }
}

impl HostNames {
    /// Whether `other` may have an I/O queue of this host's controller: it gives the same NQN, and
    /// the same host identifier or none (Base 2.1 §6.3).
    fn check_queue_of(&self, other: &Self, cntlid: u16) -> Result<(), NotGranted> {
        if self.nqn != other.nqn {
            let why = format!(
                "controller {cntlid} belongs to {}, not to {}",
                self.shown(),
                other.shown()
            );
            return Err(NotGranted::data(HOSTNQN, why));
        }
        if other.identifier == self.identifier || other.identifier == 0 {
            return Ok(());
        }
        let expected = match self.identifier {
            0 => "0".to_owned(),
            _ => format!("{} or 0", self.identifier_shown()),
        };
        let found = other.identifier_shown();
        let why = format!(
            "its host identifier is {found}, expected {expected} as for the admin queue of controller {cntlid}"
        );
        Err(NotGranted::data(HOSTID, why))
    }
}

fn no_controller(why: NoController, host: &HostNames) -> NotGranted {
    match why {
        NoController::Host => {
            let why = format!("{} is not among the hosts that may", host.shown());
            let result = InvalidParameter(0).with(|dword| dword.ipo(HOSTNQN).in_data(true)).0;
            NotGranted { result, ..NotGranted::new(Status::CONNECT_INVALID_HOST, why) }
        }
        NoController::Identifier(asked) => NotGranted::data(
            CNTLID,
            format!("it asks for controller {asked:#x}, expected one that there is, or any"),
        ),
        NoController::HostInUse(why) => host_in_use(&why, host),
        NoController::Busy => NotGranted::busy("all controllers are in use"),
        NoController::Unstopped(cntlid) => NotGranted {
            may_pass: true,
            ..NotGranted::busy(&format!(
                "controller {cntlid} has ended and its queues have not stopped, expected them to"
            ))
        },
        NoController::Trouble(text) => NotGranted::new(Status::INTERNAL_ERROR, text),
    }
}

/// A host that gives the identifier of another. While that one is only connected, time may change it.
fn host_in_use(why: &HostInUse, host: &HostNames) -> NotGranted {
    let text = format!(
        "{} gives host identifier {}, which {why}, expected an identifier of its own \
         (`nvme connect --hostid`)",
        host.shown(),
        host.identifier_shown()
    );
    let refused = NotGranted::data(HOSTID, text);
    match why.registered_in {
        Some(_) => refused,
        None => NotGranted { status: InvalidParameter::STATUS, ..refused },
    }
}

/// Why there is no queue, as a host is told.
pub(super) fn no_queue(why: NoQueue) -> NotGranted {
    match why {
        NoQueue::NotEnabled => NotGranted::command(
            QID,
            "its controller is not enabled, expected CC.EN 1, IOSQES 6 and IOCQES 4",
        ),
        NoQueue::Identifier { qid, granted } => {
            NotGranted::command(QID, format!("it asks for queue {qid}, expected 1 to {granted}"))
        }
        NoQueue::Exists { qid, is_ending } => exists(qid, is_ending),
        NoQueue::Memory => NotGranted::busy("there is no memory for its rings just now"),
    }
}

/// A queue is there once (Base 2.1 §3.3.2.3). But a host that has closed a connection is free to open
/// the next for the same queue at once, and that may be heard of sooner than the end of the other.
fn exists(qid: u16, is_ending: bool) -> NotGranted {
    let status = Status::COMMAND_SEQUENCE_ERROR;
    let (status, which) = match is_ending {
        true => (status, "whose commands have not ended"),
        false => (status.with_dnr(), "which it has"),
    };
    let why = format!("it asks for queue {qid}, {which}");
    NotGranted { status, may_pass: true, ..NotGranted::new(status, why) }
}
