//! Authentication at the target, and what an attacker on the way does with its messages.

use std::collections::VecDeque;

use tenmil_base::Random;
use tenmil_nvme_auth::{
    Authenticated, ChapSecret, Controller, ControllerConfig, Policy, Randomness, Step,
};
use tenmil_wire::{Command, Completion, FabricsType, Status};

use super::{TargetConnection, TargetState};
use crate::tests::single_path_host::{HOST, SUBSYSTEM};

/// What the target knows of its hosts, and requires.
pub(in crate::tests) struct TargetChap {
    pub(in crate::tests) host_secrets: Vec<ChapSecret>,
    pub(in crate::tests) controller_secret: Option<ChapSecret>,
    pub(in crate::tests) policy: Policy,
    /// I/O queues are authenticated as well.
    pub(in crate::tests) includes_io_queues: bool,
    /// A secure channel is required, too.
    pub(in crate::tests) requires_secure_channel: bool,
    /// The response to Connect says so. An attacker may clear the bit.
    pub(in crate::tests) is_announced: bool,
    /// Messages are not answered from this number on.
    pub(in crate::tests) silent_from: usize,
    /// Results of all exchanges, in order.
    pub(in crate::tests) outcomes: Vec<Authenticated>,
    /// Failures of exchanges.
    pub(in crate::tests) failures: Vec<String>,
    /// Messages of all exchanges, as they arrived or were sent.
    pub(in crate::tests) messages: Vec<(Way, Vec<u8>)>,
    /// An attacker, who may change each message.
    pub(in crate::tests) attacker: Option<Attacker>,
    /// Identities of the generated keys that are valid.
    pub(in crate::tests) generated_identities: Vec<String>,
    pub(in crate::tests) random: Random,
}

/// Changes a message, of which it knows the way and the earlier ones.
pub(in crate::tests) type Attacker = Box<dyn FnMut(Way, &mut Vec<u8>, &[(Way, Vec<u8>)]) + Send>;

/// Way of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::tests) enum Way {
    ToController,
    ToHost,
}

/// The authentication of a connection.
#[derive(Default)]
pub(super) struct ConnectionChap {
    controller: Option<Controller>,
    /// Messages for the host.
    outgoing: VecDeque<Vec<u8>>,
    /// Authentication Receive without a message as yet.
    waiting: Option<u16>,
    pub(super) is_authenticated: bool,
}

impl TargetChap {
    pub(in crate::tests) fn new(host: ChapSecret, controller: Option<ChapSecret>) -> Self {
        Self {
            host_secrets: vec![host],
            controller_secret: controller,
            policy: Policy::default(),
            includes_io_queues: true,
            requires_secure_channel: false,
            is_announced: true,
            silent_from: usize::MAX,
            outcomes: Vec::new(),
            failures: Vec::new(),
            messages: Vec::new(),
            attacker: None,
            generated_identities: Vec::new(),
            random: Random::new(7),
        }
    }

    fn config(&self, is_admin: bool, is_secure: bool) -> ControllerConfig {
        ControllerConfig {
            host_nqn: HOST.to_owned(),
            subsystem_nqn: SUBSYSTEM.to_owned(),
            host_secrets: self.host_secrets.clone(),
            controller_secret: self.controller_secret.clone(),
            admin_queue: is_admin,
            secure_channel: is_secure,
            policy: self.policy.clone(),
        }
    }

    /// A message on its way.
    fn transfer(&mut self, way: Way, mut message: Vec<u8>) -> Vec<u8> {
        if let Some(attacker) = &mut self.attacker {
            attacker(way, &mut message, &self.messages);
        }
        self.messages.push((way, message.clone()));
        message
    }
}

impl TargetConnection {
    /// What the response to Connect requires of the host.
    pub(super) fn connect_requirements(&self, queue: u16, state: &TargetState) -> u32 {
        let Some(chap) = &state.chap else { return 0 };
        // As Linux: a queue with a generated key is not authenticated.
        let is_required = self.identity.is_none() && (queue == 0 || chap.includes_io_queues);
        if !is_required || !chap.is_announced {
            return 0;
        }
        1 << 17 | u32::from(chap.requires_secure_channel) << 18
    }

    /// Whether a command is executed without authentication.
    pub(super) fn permits(&self, kind: Option<FabricsType>, state: &TargetState) -> bool {
        let Some(chap) = &state.chap else { return true };
        let is_admin = self.queue.is_none_or(|(_, queue)| queue == 0);
        let is_required = self.identity.is_none() && (is_admin || chap.includes_io_queues);
        let is_authentication = matches!(
            kind,
            Some(
                FabricsType::Connect
                    | FabricsType::AuthenticationSend
                    | FabricsType::AuthenticationReceive
            )
        );
        !is_required || self.chap.is_authenticated || is_authentication
    }

    pub(super) fn authentication_send(&mut self, tag: u16, state: &mut TargetState) -> Completion {
        let Some(chap) = &mut state.chap else { return Completion::new(0, Status::INVALID_OPCODE) };
        let message = chap.transfer(Way::ToController, self.data.0[&tag].clone());
        if chap.messages.len() > chap.silent_from {
            return Completion::new(0, Status::SUCCESS);
        }
        let is_admin = self.queue.is_some_and(|(_, queue)| queue == 0);
        let config = chap.config(is_admin, self.identity.is_some());
        let controller = match &mut self.chap.controller {
            Some(controller) if message.starts_with(&[0, 0]) => {
                controller.set_config(config).unwrap();
                controller
            }
            Some(controller) => controller,
            none => none.insert(Controller::new(config).unwrap()),
        };
        let mut bytes = [0; Randomness::BYTES];
        bytes.fill_with(|| chap.random.next_u64().to_le_bytes()[0]);
        let mut step = controller.handle_message(&message, || Randomness::new(&bytes));
        while let Step::Compute(job) = step {
            step = controller.handle_dh_result(job.run()).unwrap();
        }
        match step {
            Step::Message(message) => self.chap.outgoing.push_back(message),
            Step::Authenticated { message, outcome } => {
                self.chap.is_authenticated = true;
                self.chap.outgoing.extend(message);
                let key = outcome.tls_psk(HOST, SUBSYSTEM);
                chap.generated_identities.extend(key.map(|key| key.identity));
                chap.outcomes.push(outcome);
            }
            Step::Failed { message, failure } => {
                self.chap.is_authenticated = false;
                self.chap.outgoing.extend(message);
                chap.failures.push(failure.to_string());
            }
            Step::Compute(_) => unreachable!("computed above"),
        }
        Completion::new(0, Status::SUCCESS)
    }

    pub(super) fn authentication_receive(&mut self, tag: u16) -> Option<Completion> {
        self.chap.waiting = Some(tag);
        None
    }

    /// Completes an Authentication Receive for which there is a message.
    pub(super) fn answer_authentication(&mut self, state: &mut TargetState) {
        let Some(chap) = &mut state.chap else { return };
        let Some(tag) = self.chap.waiting else { return };
        let Some(message) = self.chap.outgoing.pop_front() else { return };
        self.chap.waiting = None;
        let message = chap.transfer(Way::ToHost, message);
        let page = self.data.0.get_mut(&tag).unwrap();
        page[..message.len()].copy_from_slice(&message);
        let moved = u32::try_from(page.len()).unwrap();
        self.end.complete(tag, moved, Completion::new(0, Status::SUCCESS)).unwrap();
    }
}

/// Type of a fabrics command.
pub(super) fn fabrics_type(command: &Command) -> Option<FabricsType> {
    FabricsType::from_u8(u8::try_from(command.nsid() & 0xff).unwrap())
}
