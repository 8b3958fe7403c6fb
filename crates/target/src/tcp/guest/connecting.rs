//! Connect: what a connection becomes.

use std::sync::Arc;

use base::{Instant, Memory, Span};
use tcp::QueueKind;
use wire::fabrics::{ConnectData, Connected};
use wire::opcode::FabricsType;
use wire::{AdminOpcode, Command, Completion, Status, nqn};

use super::{Guest, Role};
use crate::tcp::admin::Admin;
use crate::tcp::association::Association;
use crate::tcp::connect::{Asked, Granted, NotGranted, no_queue, parse};
use crate::tcp::discovery::Discovery;
use crate::tcp::io::Io;
use crate::tcp::memory::Standing;
use crate::tcp::news::News;
use crate::tcp::rooms::{Share, Way};
use crate::tcp::seat::ShownQueue;

/// A Connect that is not answered yet: its queue is there still, and may be on its way out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patient {
    tag: u16,
    until: Instant,
    /// When its host has to be connected.
    connect_by: Instant,
}

/// How often it is looked whether the queue is gone.
const LOOK: Span = Span::from_ms(1);

impl Guest {
    /// The first command of a connection.
    #[cold]
    pub(super) fn connect(&mut self, now: Instant, tag: u16) {
        if self.patient.is_some() {
            let status = Status::COMMAND_SEQUENCE_ERROR.with_dnr();
            self.rooms.finish(&mut self.end, tag, 0, Completion::new(0, status));
            return;
        }
        let until = now.after(self.service.limits().quiesce);
        self.try_connect(now, Patient { tag, until, connect_by: self.connect_by });
    }

    /// Looks again whether a Connect that waits can be granted. False if none waits.
    #[cold]
    pub(super) fn connect_again(&mut self, now: Instant) -> bool {
        let Some(patient) = self.patient.take() else { return false };
        self.try_connect(now, patient);
        true
    }

    fn try_connect(&mut self, now: Instant, patient: Patient) {
        let tag = patient.tag;
        let command = *self.rooms.command(tag);
        let completion = match self.granted(now, tag, &command) {
            Err(NotGranted { may_pass: true, .. }) if now < patient.until => {
                self.patient = Some(patient);
                self.connect_by = now.after(LOOK);
                return;
            }
            Ok(cntlid) => {
                self.connect_by = Instant::NEVER;
                let result = Connected(0).with(|connected| connected.cntlid(cntlid)).0;
                Completion::new(0, Status::SUCCESS).with_dw0(result)
            }
            Err(NotGranted { status, result, why, .. }) => {
                self.connect_by = patient.connect_by;
                let (connection, peer) = (self.id, self.peer.clone());
                self.service.tell(News::Refused { connection, peer, why });
                Completion::new(0, status).with_dw0(result)
            }
        };
        self.rooms.finish(&mut self.end, tag, 0, completion);
    }

    fn granted(&mut self, now: Instant, tag: u16, command: &Command) -> Result<u16, NotGranted> {
        let refuse = |status: Status, why: &str| NotGranted {
            status: status.with_dnr(),
            result: 0,
            why: why.to_owned(),
            may_pass: false,
        };
        let is_fabrics = command.opcode() == AdminOpcode::FabricsCommands.code();
        let kind = FabricsType::from_u8(command.nsid().to_le_bytes()[0]);
        if !is_fabrics || kind != Some(FabricsType::Connect) {
            let why = "its first command is not Connect";
            return Err(refuse(Status::COMMAND_SEQUENCE_ERROR, why));
        }
        let connect = parse(command)?;
        let mut data = ConnectData::zeroed();
        let len = u32::try_from(ConnectData::BYTES).unwrap_or(u32::MAX);
        if self.rooms.data(tag) != (Way::FromHost, len) {
            let why =
                format!("its Connect has {} bytes of data, expected {len}", self.rooms.data(tag).1);
            return Err(refuse(Status::DATA_SGL_LENGTH_INVALID, &why));
        }
        let mut bytes = [0; ConnectData::BYTES];
        if let Some(segment) = self.rooms.front_of(tag, len) {
            let loaded = self.rooms.budget().regions().load(segment, &mut bytes);
            loaded.map_err(|_| refuse(Status::INTERNAL_ERROR, "its data lie nowhere"))?;
            data = ConnectData::from_bytes(&bytes);
        }
        let (service, port, peer) = (&self.service, self.port, self.peer.as_str());
        let asked = Asked { service, port, peer, now, connect, data: &data };
        let granted = asked.answer()?;
        let standing = self.count(&granted)?;
        let entries = connect.sqsize + 1;
        let flow_control = !connect.disable_sq_flow_control;
        match granted {
            Granted::Admin(association) => {
                self.end.connected(QueueKind::Admin { entries, flow_control });
                let bell = Arc::clone(&self.seat);
                association.front().set_bell(Arc::new(move || bell.ring()));
                let cntlid = association.cntlid;
                self.service.tell(News::Associated {
                    connection: self.id,
                    peer: self.peer.clone(),
                    host: association.host.nqn.clone(),
                    subsystem: association.offer().nqn().to_owned(),
                    cntlid,
                });
                if association.host.nqn.is_empty() {
                    let (peer, nqn) = (&self.peer, association.offer().nqn());
                    self.service.tell(News::Notice(format!(
                        "connection {}: {peer} connected without a host NQN to {nqn}, which any host \
                         may use",
                        self.id
                    )));
                }
                self.show(&association, 0);
                self.rooms.admit(Share::OwnFirst, (&association.host.nqn, standing));
                self.role = Role::Admin(Box::new(Admin::new(association, self.service.limits())));
                Ok(cntlid)
            }
            Granted::Discovery(host) => {
                self.end.connected(QueueKind::Admin { entries, flow_control });
                let cntlid = self.service.discover(&self.seat);
                self.seat.shown().queue = Some(ShownQueue {
                    host: host.clone(),
                    subsystem: nqn::DISCOVERY.to_owned(),
                    cntlid,
                    qid: 0,
                });
                let here = self.stream.as_ref().and_then(|stream| stream.local_address());
                let (came_by, known) = ((self.port, here), (cntlid, connect.kato));
                let discovery = Discovery::new(self.service.clone(), host, came_by, known, now);
                self.role = Role::Discovery(Box::new(discovery));
                Ok(cntlid)
            }
            Granted::Io { association, qid } => {
                let cntlid = association.cntlid;
                let depth = self.service.limits().queue_entries;
                let io = Io::new(&self.service, association, (qid, depth), &mut self.rooms, now);
                let io = io.map_err(no_queue)?;
                let bell = Arc::clone(&self.seat);
                io.link().set_bell(Arc::new(move || bell.ring()));
                self.end.connected(QueueKind::Io { entries, flow_control });
                self.show(io.association(), qid);
                self.rooms.admit(Share::Common, (&io.association().host.nqn, standing));
                self.role = Role::Io(Box::new(io));
                Ok(cntlid)
            }
        }
    }

    /// Counts the connection as what it asks to be, if there may be one more of that. What its host
    /// may have of the memory.
    fn count(&mut self, granted: &Granted) -> Result<Standing, NotGranted> {
        let names_hosts = self.service.names_hosts();
        let mut is_named = false;
        let counted = match granted {
            Granted::Discovery(_) => self.admitted.discovers(names_hosts),
            Granted::Admin(association) | Granted::Io { association, .. } => {
                is_named = association.offer().names_hosts();
                self.admitted.belongs_to(&association.host.nqn, is_named, names_hosts)
            }
        };
        counted.map_err(|why| NotGranted::busy(&why.to_string()))?;
        Ok(Standing::new(is_named, names_hosts))
    }

    /// It is a queue of this association now.
    fn show(&self, association: &Association, qid: u16) {
        self.seat.shown().queue = Some(ShownQueue {
            host: association.host.nqn.clone(),
            subsystem: association.offer().nqn().to_owned(),
            cntlid: association.cntlid,
            qid,
        });
    }
}
