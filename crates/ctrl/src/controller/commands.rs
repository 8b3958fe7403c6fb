//! The admin commands there are: how much data each moves, and who carries it out.
//!
//! [`Controller::offers`] is the one list of what is supported; the dispatch, the Identify bits
//! and the Commands Supported and Effects log page are made from it.

use base::Instant;
use wire::admin::{
    Abort, CrossControllerReset, DeviceSelfTest, DoorbellBufferConfig, FirmwareCommit,
    FirmwareImageDownload, FormatNvm, GetFeatures, GetLogPage, Identify, NamespaceAttachment,
    NamespaceManagement, SetFeatures,
};
use wire::{AdminOpcode, Command, Fuse, Status, Typed};

use super::Controller;
use super::config::Transport;
use super::contract::{AdminData, AdminEnd, AdminStep};

/// Bytes of Identify structures, and of lists that hosts send.
pub(super) const PAGE_BYTES: u32 = 4096;

/// What carrying out a command ends in, short of a refusal.
pub(super) type Step = Result<AdminStep, Status>;

impl Controller {
    /// The data that goes with `command`, or why it is refused before any data moves.
    pub fn data(&self, command: &Command) -> Result<AdminData, Status> {
        self.data_of(command).map_err(settled)
    }

    /// Carries out `command`. `data` holds what the host sent, as long as [`data`](Self::data)
    /// said; or takes what the host gets, exactly as long, if the command ends well.
    pub fn execute(&mut self, now: Instant, command: &Command, data: &mut Vec<u8>) -> AdminStep {
        self.in_use();
        self.keep_alive.heard();
        match self.step(now, command, data) {
            Ok(step) => step,
            Err(status) => AdminStep::Done(AdminEnd::refused(settled(status))),
        }
    }

    /// Whether this controller knows the opcode.
    pub(super) fn offers(&self, opcode: AdminOpcode) -> bool {
        let by_memory = matches!(self.config.transport, Transport::Memory { .. });
        match opcode {
            AdminOpcode::Identify
            | AdminOpcode::GetLogPage
            | AdminOpcode::GetFeatures
            | AdminOpcode::SetFeatures
            | AdminOpcode::Abort
            | AdminOpcode::AsynchronousEventRequest
            | AdminOpcode::KeepAlive
            | AdminOpcode::FirmwareCommit
            | AdminOpcode::FirmwareImageDownload
            | AdminOpcode::DeviceSelfTest => true,
            AdminOpcode::CreateIoCompletionQueue
            | AdminOpcode::CreateIoSubmissionQueue
            | AdminOpcode::DeleteIoCompletionQueue
            | AdminOpcode::DeleteIoSubmissionQueue => by_memory,
            AdminOpcode::DoorbellBufferConfig => {
                self.config.transport == Transport::Memory { doorbell_buffers: true }
            }
            AdminOpcode::NamespaceManagement | AdminOpcode::NamespaceAttachment => {
                !self.subsystem.about().pool_block_sizes.is_empty()
            }
            AdminOpcode::FormatNvm => self.can_format(),
            AdminOpcode::CrossControllerReset => self.config.instance.is_some(),
            _ => false,
        }
    }

    /// The opcode, if it is offered and not half of a fused pair.
    fn opcode(&self, command: &Command) -> Result<AdminOpcode, Status> {
        let opcode = AdminOpcode::from_u8(command.opcode());
        let opcode = opcode.filter(|&opcode| self.offers(opcode)).ok_or(Status::INVALID_OPCODE)?;
        if command.fuse() == Fuse::Normal { Ok(opcode) } else { Err(Status::INVALID_FIELD) }
    }

    fn data_of(&self, command: &Command) -> Result<AdminData, Status> {
        match self.opcode(command)? {
            AdminOpcode::Identify => Ok(AdminData::ToHost(PAGE_BYTES)),
            AdminOpcode::GetLogPage => {
                self.transfer(GetLogPage::parse(command)?.len_bytes()).map(AdminData::ToHost)
            }
            AdminOpcode::FirmwareImageDownload => {
                let download = FirmwareImageDownload::parse(command)?;
                self.transfer(download.len_bytes()).map(AdminData::FromHost)
            }
            AdminOpcode::GetFeatures => {
                let len_bytes = self.get_features_bytes(&GetFeatures::parse(command)?)?;
                Ok(if len_bytes == 0 { AdminData::None } else { AdminData::ToHost(len_bytes) })
            }
            AdminOpcode::SetFeatures => {
                let len_bytes = self.set_features_bytes(&SetFeatures::parse(command)?)?;
                Ok(if len_bytes == 0 { AdminData::None } else { AdminData::FromHost(len_bytes) })
            }
            AdminOpcode::NamespaceManagement => {
                self.management_data(&NamespaceManagement::parse(command)?)
            }
            AdminOpcode::NamespaceAttachment => Ok(AdminData::FromHost(PAGE_BYTES)),
            _ => Ok(AdminData::None),
        }
    }

    fn step(&mut self, now: Instant, command: &Command, data: &mut Vec<u8>) -> Step {
        let opcode = self.opcode(command)?;
        if let AdminData::FromHost(len_bytes) = self.data_of(command)?
            && data.len() != len_bytes as usize
        {
            return Err(Status::INTERNAL_ERROR);
        }
        match opcode {
            AdminOpcode::Identify => self.identify(&Identify::parse(command)?, data),
            AdminOpcode::GetLogPage => self.get_log_page(now, &GetLogPage::parse(command)?, data),
            AdminOpcode::GetFeatures => self.get_features(now, &GetFeatures::parse(command)?, data),
            AdminOpcode::SetFeatures => {
                self.set_features(now, command.cid(), &SetFeatures::parse(command)?, data)
            }
            AdminOpcode::Abort => self.abort(&Abort::parse(command)?),
            AdminOpcode::CrossControllerReset => {
                self.cross_reset(CrossControllerReset::parse(command)?)
            }
            AdminOpcode::AsynchronousEventRequest => {
                self.events.request().map(|()| AdminStep::AsyncEvent)
            }
            AdminOpcode::KeepAlive => {
                self.keep_alive.restart(now);
                Ok(AdminStep::Done(AdminEnd::OK))
            }
            AdminOpcode::CreateIoCompletionQueue => self.create_completion_queue(command),
            AdminOpcode::CreateIoSubmissionQueue => self.create_submission_queue(command),
            AdminOpcode::DeleteIoCompletionQueue => self.delete_completion_queue(command),
            AdminOpcode::DeleteIoSubmissionQueue => self.delete_submission_queue(command),
            AdminOpcode::DoorbellBufferConfig => {
                doorbell_buffers(&DoorbellBufferConfig::parse(command)?)
            }
            AdminOpcode::FirmwareImageDownload => {
                self.firmware_download(&FirmwareImageDownload::parse(command)?, data)
            }
            AdminOpcode::FirmwareCommit => self.firmware_commit(&FirmwareCommit::parse(command)?),
            AdminOpcode::DeviceSelfTest => {
                self.device_self_test(now, &DeviceSelfTest::parse(command)?)
            }
            AdminOpcode::NamespaceManagement => {
                self.namespace_management(&NamespaceManagement::parse(command)?, data)
            }
            AdminOpcode::NamespaceAttachment => {
                self.namespace_attachment(&NamespaceAttachment::parse(command)?, data)
            }
            AdminOpcode::FormatNvm => {
                self.format_nvm(now, command.cid(), &FormatNvm::parse(command)?)
            }
            _ => Err(Status::INVALID_OPCODE),
        }
    }

    /// A length that fits into one transfer.
    pub(super) fn transfer(&self, len_bytes: u64) -> Result<u32, Status> {
        let fits = |&len_bytes: &u32| len_bytes <= self.config.transfer_bytes_max;
        u32::try_from(len_bytes).ok().filter(fits).ok_or(Status::INVALID_FIELD)
    }

    fn abort(&mut self, abort: &Abort) -> Step {
        if self.aborts >= self.config.aborts_max {
            return Err(Status::ABORT_COMMAND_LIMIT_EXCEEDED);
        }
        self.aborts += 1;
        Ok(AdminStep::Abort { sqid: abort.sqid, cid: abort.abort_cid })
    }

    /// Nobody resets itself this way (Base 2.3 §5.4.3).
    fn cross_reset(&self, reset: CrossControllerReset) -> Step {
        if reset.icid == self.config.cntlid {
            return Err(Status::INVALID_FIELD);
        }
        Ok(AdminStep::Reset(reset))
    }

    fn firmware_download(&mut self, download: &FirmwareImageDownload, data: &[u8]) -> Step {
        self.download.put(download.offset_bytes(), data)?;
        Ok(AdminStep::Done(AdminEnd::OK))
    }

    fn firmware_commit(&mut self, commit: &FirmwareCommit) -> Step {
        if commit.bpid {
            return Err(Status::INVALID_FIELD);
        }
        let revision = self.download.take()?;
        let mut state = self.subsystem.lock();
        if state.firmware.commit(commit.ca, commit.fs, revision)? {
            state.post_activation();
        }
        self.subsystem.settle(state);
        Ok(AdminStep::Done(AdminEnd::OK))
    }
}

/// Both buffers are pages (Base 2.1 §5.2.5).
fn doorbell_buffers(config: &DoorbellBufferConfig) -> Step {
    let (shadow, event_index) = (config.shadow_doorbells, config.event_indexes);
    for address in [shadow, event_index] {
        if address == 0 || !address.is_multiple_of(u64::from(PAGE_BYTES)) {
            return Err(Status::INVALID_FIELD);
        }
    }
    Ok(AdminStep::DoorbellBuffers { shadow, event_index })
}

/// A refusal as the host gets it: with Do Not Retry, unless time alone may change the answer.
pub(super) fn settled(status: Status) -> Status {
    let passes = [
        Status::INTERNAL_ERROR,
        Status::NAMESPACE_NOT_READY,
        Status::FORMAT_IN_PROGRESS,
        Status::SELF_TEST_IN_PROGRESS,
        Status::ABORT_COMMAND_LIMIT_EXCEEDED,
        Status::AER_LIMIT_EXCEEDED,
        Status::NOT_ENOUGH_RESOURCES,
        Status::ANA_INACCESSIBLE,
        Status::ANA_TRANSITION,
    ];
    if passes.iter().any(|&passing| passing.is(status)) { status } else { status.with_dnr() }
}
