//! Commands of the target: fabrics, admin and I/O.

use tenmil_base::Span;
use tenmil_nvme_tcp::QueueKind;
use tenmil_wire::fabrics::{Connect, ConnectData, InvalidParameter, PropertyGet, PropertySet};
use tenmil_wire::identify::Cns;
use tenmil_wire::identify::namespace::IdentifyNamespace;
use tenmil_wire::register::{Capabilities, Configuration, ControllerStatus};
use tenmil_wire::{AdminOpcode, Command, Completion, FabricsType, Status, TypedCommand};

use super::authentication::fabrics_type;
use super::{BLOCKS, DelayedCommand, TargetConnection, TargetState};

impl TargetConnection {
    pub(super) fn execute(&mut self, tag: u16, to_host: u32, state: &mut TargetState) {
        let command = self.commands[&tag];
        let kind = (command.opcode() == AdminOpcode::FabricsCommands.code())
            .then(|| fabrics_type(&command))
            .flatten();
        let answer = match self.queue {
            _ if !self.permits(kind, state) => {
                Some(Completion::new(0, Status::AUTHENTICATION_REQUIRED.with_dnr()))
            }
            _ if kind == Some(FabricsType::AuthenticationReceive) => {
                self.authentication_receive(tag)
            }
            _ if command.opcode() == AdminOpcode::FabricsCommands.code() => {
                Some(self.fabrics(tag, &command, state))
            }
            Some((_, 0)) => self.admin(tag, &command, state),
            Some(_) => self.io(tag, &command, state),
            None => Some(Completion::new(0, Status::COMMAND_SEQUENCE_ERROR)),
        };
        if let Some(completion) = answer {
            let moved = if completion.status().is_success() { to_host } else { 0 };
            self.end.complete(tag, moved, completion).unwrap();
        }
    }

    fn fabrics(&mut self, tag: u16, command: &Command, state: &mut TargetState) -> Completion {
        let ok = Completion::new(0, Status::SUCCESS);
        match fabrics_type(command) {
            Some(FabricsType::AuthenticationSend) => self.authentication_send(tag, state),
            Some(FabricsType::Connect) => self.connect(tag, command, state),
            Some(FabricsType::PropertyGet) => {
                let value = match PropertyGet::parse(command).unwrap().ofst {
                    0 => {
                        let mqes = state.mqes;
                        Capabilities::zeroed().with(|cap| cap.mqes(mqes).css_nvm(true).to(4)).0
                    }
                    8 => 0x0001_0400,
                    0x14 => state.cc.0.into(),
                    0x1c => state.csts.0.into(),
                    _ => 0,
                };
                ok.with_result(value)
            }
            Some(FabricsType::PropertySet) => {
                let set = PropertySet::parse(command).unwrap();
                if set.ofst == 0x14 {
                    state.cc = Configuration(u32::try_from(set.value).unwrap());
                    let (en, shn) = (state.cc.en(), state.cc.shn());
                    if let (false, Some((association, _))) = (en, self.queue) {
                        state.held.retain(|held| held.association != association);
                    }
                    let is_down = shn != tenmil_wire::register::ShutdownNotification::None;
                    state.csts = ControllerStatus::zeroed().with(|csts| {
                        let csts = csts.rdy(en || state.ignores_disable);
                        if is_down {
                            csts.shst(tenmil_wire::register::ShutdownStatus::Complete)
                        } else {
                            csts
                        }
                    });
                }
                ok
            }
            _ => Completion::new(0, Status::INVALID_OPCODE),
        }
    }

    fn connect(&mut self, tag: u16, command: &Command, state: &mut TargetState) -> Completion {
        if let Some(status) = state.refuses {
            return Completion::new(0, status);
        }
        let connect = Connect::parse(command).unwrap();
        if connect.qid != 0
            && let Some(refusal) = state.refuses_queue.take()
        {
            return refusal;
        }
        let data = ConnectData::from_bytes(self.data.0[&tag].as_slice().try_into().unwrap());
        let field = data.subnqn();
        let name = tenmil_wire::nqn::parse_nqn_field(&field.0).unwrap();
        assert!(
            [crate::tests::single_path_host::SUBSYSTEM, tenmil_wire::nqn::DISCOVERY]
                .contains(&name),
            "{name}"
        );
        let (entries, flow_control) = (connect.sqsize + 1, !connect.disable_sq_flow_control);
        if connect.qid == 0 && entries > state.admin_entries {
            let field = InvalidParameter(0).with(|dword| dword.ipo(44));
            return Completion::new(0, InvalidParameter::STATUS.with_dnr()).with_dw0(field.0);
        }
        if connect.qid == 0 {
            assert_eq!(data.cntlid(), tenmil_wire::fabrics::CNTLID_DYNAMIC);
            state.association += 1;
            state.kato = Span::from_ms(connect.kato.into());
            let until = state.now.after(state.max_execution_time());
            state.until.insert(state.association, until);
            (state.cc, state.csts) = (Configuration::zeroed(), ControllerStatus::zeroed());
            self.end.set_queue_kind(QueueKind::Admin { entries, flow_control });
        } else {
            assert_eq!(data.cntlid(), state.association);
            assert!(entries <= state.mqes + 1 && state.csts.rdy());
            self.end.set_queue_kind(QueueKind::Io { entries, flow_control });
        }
        self.queue = Some((state.association, connect.qid));
        state.connects.push(connect.qid);
        let requirements = self.connect_requirements(connect.qid, state);
        Completion::new(0, Status::SUCCESS).with_dw0(u32::from(state.association) | requirements)
    }

    fn admin(
        &mut self,
        tag: u16,
        command: &Command,
        state: &mut TargetState,
    ) -> Option<Completion> {
        state.admin_commands += 1;
        if state.withheld_opcode == Some(command.opcode()) {
            return None;
        }
        let ok = Completion::new(0, Status::SUCCESS);
        match AdminOpcode::from_u8(command.opcode()) {
            Some(AdminOpcode::AsynchronousEventRequest) => {
                self.event_tags.push(tag);
                None
            }
            Some(AdminOpcode::KeepAlive) => {
                let (whose, _) = self.queue?;
                state.record_host_activity(whose);
                state.keep_alives += 1;
                Some(ok)
            }
            Some(AdminOpcode::GetLogPage)
                if command.cdw10() & 0xff == 0x0c && !state.identity.anars() =>
            {
                Some(Completion::new(0, Status::INVALID_LOG_PAGE))
            }
            Some(AdminOpcode::GetLogPage)
                if command.cdw10() & 0xff == 0x0c && state.refuses_ana_log.is_some() =>
            {
                state.refuses_ana_log.map(|status| Completion::new(0, status))
            }
            Some(AdminOpcode::GetLogPage) if command.cdw10() & 0xff == 0x0c => {
                let page = self.data.0.get_mut(&tag).unwrap();
                let (whole, from) = (state.ana_log_page(), command.cdw12() as usize);
                let bytes = &whole[from..whole.len().min(from + page.len())];
                page[..bytes.len()].copy_from_slice(bytes);
                Some(ok)
            }
            // Changed Namespace List.
            Some(AdminOpcode::GetLogPage) if command.cdw10() & 0xff == 0x04 => {
                self.data.0.get_mut(&tag).unwrap()[0] = 1;
                Some(ok)
            }
            Some(AdminOpcode::Identify) => {
                let page = self.data.0.get_mut(&tag).unwrap();
                assert_eq!(page.len(), 4096);
                match Cns::from_code(u8::try_from(command.cdw10() & 0xff).unwrap()) {
                    Cns::Controller => {
                        let cirn = state.cirn(state.association);
                        let id = state.identity.clone().with(|id| id.cirn(cirn));
                        page.copy_from_slice(id.as_bytes());
                    }
                    Cns::ActiveNamespaces => {
                        page[0] = u8::from(command.nsid() == 0 && state.has_namespace);
                    }
                    Cns::Namespace => {
                        let blocks = BLOCKS as u64;
                        let mut id = IdentifyNamespace::zeroed().with(|id| {
                            id.nsze(blocks).ncap(blocks).nuse(blocks).anagrpid(state.ana_group)
                        });
                        if let Some(cache) = state.cache {
                            cache.store_to_identify_namespace(&mut id);
                        }
                        page.copy_from_slice(id.as_bytes());
                        page[119] = state.nguid;
                        // NMIC: the namespace is shared.
                        page[30] = u8::from(state.is_shared);
                        // LBADS of the first format.
                        page[130] = 9;
                    }
                    _ => {}
                }
                Some(ok)
            }
            Some(AdminOpcode::Abort) => {
                state.aborted.push(u16::try_from(command.cdw10() >> 16).unwrap());
                Some(ok)
            }
            Some(AdminOpcode::CrossControllerReset) => {
                Some(state.execute_cross_controller_reset(command))
            }
            Some(AdminOpcode::SetFeatures) if command.cdw10() & 0xff == 7 => {
                Some(ok.with_dw0(0x0007_0007))
            }
            _ => Some(ok),
        }
    }

    fn io(&mut self, tag: u16, command: &Command, state: &mut TargetState) -> Option<Completion> {
        if command.nsid() == 0 {
            if state.ignores_probes {
                return None;
            }
            return Some(Completion::new(0, Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr()));
        }
        state.received_io_commands += 1;
        let first = u64::from(command.cdw11()) << 32 | u64::from(command.cdw10());
        if state.fatal_lba == Some(first) {
            self.is_over = true;
            return None;
        }
        if state.withholds_completions {
            state.unanswered.push(command.cid());
            return None;
        }
        if let Some(status) = state.status_override.or(state.ana_status()) {
            return Some(Completion::new(0, status));
        }
        let (association, _) = self.queue?;
        if !state.is_alive(association) {
            self.is_over = true;
            return None;
        }
        let mut bytes = self.data.0.get(&tag).cloned().unwrap_or_default();
        if let Some(execution_delay) = state.execution_delay() {
            let (at, stream) = (state.now.after(execution_delay), self.number);
            let command = *command;
            state.held.push(DelayedCommand { at, association, stream, tag, command, bytes });
            return None;
        }
        let completion = state.execute_io(association, command, &mut bytes);
        self.data.0.insert(tag, bytes);
        Some(completion)
    }
}
