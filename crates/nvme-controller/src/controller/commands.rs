//! Supported admin commands: their data lengths and their dispatch.
//!
//! [`Controller::supports_admin_opcode`] is the only list of supported commands; the dispatch, the Identify bits and
//! the Commands Supported and Effects log page are derived from it.

use tenmil_base::Instant;
use tenmil_wire::admin::{
    Abort, CrossControllerReset, DeviceSelfTest, DoorbellBufferConfig, FirmwareCommit,
    FirmwareImageDownload, FormatNvm, GetFeatures, GetLogPage, Identify, NamespaceAttachment,
    NamespaceManagement, SetFeatures,
};
use tenmil_wire::{AdminOpcode, Command, Fuse, Status, TypedCommand};

use super::Controller;
use super::config::TransportModel;
use super::transport_interface::{AdminDataTransfer, AdminOutcome, AdminResult};

/// Bytes of Identify structures, and of lists sent by hosts.
pub(super) const PAGE_BYTES: u32 = 4096;

/// Next admin step, or the error status.
pub(super) type CommandResult = Result<AdminOutcome, Status>;

impl Controller {
    /// Data length and direction of `command`, or the status that rejects it before any data moves.
    pub fn command_data_length(&self, command: &Command) -> Result<AdminDataTransfer, Status> {
        self.command_data(command).map_err(with_dnr_unless_retryable)
    }

    /// Executes `command`. `data` holds the data from the host, with the length returned by
    /// [`command_data_length`](Self::command_data_length), or receives the data for the host, with exactly that length, if the command
    /// succeeds.
    pub fn execute(&mut self, now: Instant, command: &Command, data: &mut Vec<u8>) -> AdminOutcome {
        self.mark_power_loss_unsafe();
        self.keep_alive.note_activity();
        match self.execute_command(now, command, data) {
            Ok(step) => step,
            Err(status) => {
                AdminOutcome::Done(AdminResult::failure(with_dnr_unless_retryable(status)))
            }
        }
    }

    /// Whether this controller supports the opcode.
    pub(super) fn supports_admin_opcode(&self, opcode: AdminOpcode) -> bool {
        let by_memory = matches!(self.config.transport, TransportModel::Memory { .. });
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
                self.config.transport == TransportModel::Memory { doorbell_buffers: true }
            }
            AdminOpcode::NamespaceManagement | AdminOpcode::NamespaceAttachment => {
                !self.subsystem.constants().pool_block_sizes.is_empty()
            }
            AdminOpcode::FormatNvm => self.can_format(),
            AdminOpcode::CrossControllerReset => self.config.instance.is_some(),
            _ => false,
        }
    }

    /// Decodes the opcode, if it is supported and not part of a fused pair.
    fn decode_supported_opcode(&self, command: &Command) -> Result<AdminOpcode, Status> {
        let opcode = AdminOpcode::from_u8(command.opcode());
        let opcode = opcode
            .filter(|&opcode| self.supports_admin_opcode(opcode))
            .ok_or(Status::INVALID_OPCODE)?;
        if command.fuse() == Fuse::Normal { Ok(opcode) } else { Err(Status::INVALID_FIELD) }
    }

    fn command_data(&self, command: &Command) -> Result<AdminDataTransfer, Status> {
        match self.decode_supported_opcode(command)? {
            AdminOpcode::Identify => Ok(AdminDataTransfer::ToHost(PAGE_BYTES)),
            AdminOpcode::GetLogPage => self
                .check_transfer_length(GetLogPage::parse(command)?.len_bytes())
                .map(AdminDataTransfer::ToHost),
            AdminOpcode::FirmwareImageDownload => {
                let download = FirmwareImageDownload::parse(command)?;
                self.check_transfer_length(download.len_bytes()).map(AdminDataTransfer::FromHost)
            }
            AdminOpcode::GetFeatures => {
                let len_bytes = self.get_features_data_len(&GetFeatures::parse(command)?)?;
                Ok(if len_bytes == 0 {
                    AdminDataTransfer::None
                } else {
                    AdminDataTransfer::ToHost(len_bytes)
                })
            }
            AdminOpcode::SetFeatures => {
                let len_bytes = self.set_features_data_len(&SetFeatures::parse(command)?)?;
                Ok(if len_bytes == 0 {
                    AdminDataTransfer::None
                } else {
                    AdminDataTransfer::FromHost(len_bytes)
                })
            }
            AdminOpcode::NamespaceManagement => {
                self.namespace_management_data_length(&NamespaceManagement::parse(command)?)
            }
            AdminOpcode::NamespaceAttachment => Ok(AdminDataTransfer::FromHost(PAGE_BYTES)),
            _ => Ok(AdminDataTransfer::None),
        }
    }

    fn execute_command(
        &mut self,
        now: Instant,
        command: &Command,
        data: &mut Vec<u8>,
    ) -> CommandResult {
        let opcode = self.decode_supported_opcode(command)?;
        if let AdminDataTransfer::FromHost(len_bytes) = self.command_data(command)?
            && data.len() != len_bytes as usize
        {
            return Err(Status::INTERNAL_ERROR);
        }
        match opcode {
            AdminOpcode::Identify => self.execute_identify(&Identify::parse(command)?, data),
            AdminOpcode::GetLogPage => self.get_log_page(now, &GetLogPage::parse(command)?, data),
            AdminOpcode::GetFeatures => self.get_features(now, &GetFeatures::parse(command)?, data),
            AdminOpcode::SetFeatures => {
                self.set_features(now, command.cid(), &SetFeatures::parse(command)?, data)
            }
            AdminOpcode::Abort => self.execute_abort(&Abort::parse(command)?),
            AdminOpcode::CrossControllerReset => {
                self.execute_cross_controller_reset(CrossControllerReset::parse(command)?)
            }
            AdminOpcode::AsynchronousEventRequest => {
                self.events.accept_request().map(|()| AdminOutcome::AsyncEvent)
            }
            AdminOpcode::KeepAlive => {
                self.keep_alive.restart(now);
                Ok(AdminOutcome::Done(AdminResult::OK))
            }
            AdminOpcode::CreateIoCompletionQueue => self.check_create_completion_queue(command),
            AdminOpcode::CreateIoSubmissionQueue => self.check_create_submission_queue(command),
            AdminOpcode::DeleteIoCompletionQueue => self.check_delete_completion_queue(command),
            AdminOpcode::DeleteIoSubmissionQueue => self.check_delete_submission_queue(command),
            AdminOpcode::DoorbellBufferConfig => {
                check_doorbell_buffers(&DoorbellBufferConfig::parse(command)?)
            }
            AdminOpcode::FirmwareImageDownload => {
                self.firmware_download(&FirmwareImageDownload::parse(command)?, data)
            }
            AdminOpcode::FirmwareCommit => self.firmware_commit(&FirmwareCommit::parse(command)?),
            AdminOpcode::DeviceSelfTest => {
                self.execute_device_self_test(now, &DeviceSelfTest::parse(command)?)
            }
            AdminOpcode::NamespaceManagement => {
                self.execute_namespace_management(&NamespaceManagement::parse(command)?, data)
            }
            AdminOpcode::NamespaceAttachment => {
                self.execute_namespace_attachment(&NamespaceAttachment::parse(command)?, data)
            }
            AdminOpcode::FormatNvm => {
                self.format_nvm(now, command.cid(), &FormatNvm::parse(command)?)
            }
            _ => Err(Status::INVALID_OPCODE),
        }
    }

    /// Checks that a length fits into one transfer.
    pub(super) fn check_transfer_length(&self, len_bytes: u64) -> Result<u32, Status> {
        let fits = |&len_bytes: &u32| len_bytes <= self.config.transfer_bytes_max;
        u32::try_from(len_bytes).ok().filter(fits).ok_or(Status::INVALID_FIELD)
    }

    fn execute_abort(&mut self, abort: &Abort) -> CommandResult {
        if self.aborts >= self.config.aborts_max {
            return Err(Status::ABORT_COMMAND_LIMIT_EXCEEDED);
        }
        self.aborts += 1;
        Ok(AdminOutcome::Abort { sqid: abort.sqid, cid: abort.abort_cid })
    }

    /// A controller cannot reset itself by this command (Base 2.3 §5.4.3).
    fn execute_cross_controller_reset(&self, reset: CrossControllerReset) -> CommandResult {
        if reset.icid == self.config.cntlid {
            return Err(Status::INVALID_FIELD);
        }
        Ok(AdminOutcome::Reset(reset))
    }

    fn firmware_download(
        &mut self,
        download: &FirmwareImageDownload,
        data: &[u8],
    ) -> CommandResult {
        self.download.write_part(download.offset_bytes(), data)?;
        Ok(AdminOutcome::Done(AdminResult::OK))
    }

    fn firmware_commit(&mut self, commit: &FirmwareCommit) -> CommandResult {
        if commit.bpid {
            return Err(Status::INVALID_FIELD);
        }
        let revision = self.download.finish_image()?;
        let mut state = self.subsystem.lock_state();
        if state.firmware.commit(commit.ca, commit.fs, revision)? {
            state.post_firmware_activation();
        }
        self.subsystem.publish_and_notify(state);
        Ok(AdminOutcome::Done(AdminResult::OK))
    }
}

/// Checks that both buffers are page-aligned (Base 2.1 §5.2.5).
fn check_doorbell_buffers(config: &DoorbellBufferConfig) -> CommandResult {
    let (shadow, event_index) = (config.shadow_doorbells, config.event_indexes);
    for address in [shadow, event_index] {
        if address == 0 || !address.is_multiple_of(u64::from(PAGE_BYTES)) {
            return Err(Status::INVALID_FIELD);
        }
    }
    Ok(AdminOutcome::DoorbellBuffers { shadow, event_index })
}

/// Adds Do Not Retry to a status, unless a later retry may succeed.
pub(super) fn with_dnr_unless_retryable(status: Status) -> Status {
    let transient = [
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
    if transient.iter().any(|&status_code| status_code.has_same_code_as(status)) {
        status
    } else {
        status.with_dnr()
    }
}
