//! Interface for the owner of a controller: any admin command, with helpers for the common ones.
//!
//! Every command passes through [`Controller::submit_admin`] and completes with
//! [`Event::AdminCompleted`](crate::Event::AdminCompleted). Until then, the controller may access its
//! memory.

use tenmil_base::{Dma, Instant, Mmio, Segment, Span};
use tenmil_wire::admin::{
    Abort, AttachmentSelect, CommitAction, DeviceSelfTest, FirmwareCommit, FormatNvm, GetFeatures,
    GetLogPage, Identify, ManagementSelect, NamespaceAttachment, NamespaceManagement, SelfTestCode,
    SetFeatures,
};
use tenmil_wire::{AdminOpcode, Command, TypedCommand};

use super::{Controller, FirmwareDownloadCommands, Phase, QueueTransports};
use crate::error::RequestError;

impl<M: Mmio, D: Dma, Q: QueueTransports<M, D>> Controller<M, D, Q> {
    /// Submits an admin command with its data at `data`. Command identifier and data pointer are set
    /// here.
    ///
    /// Commands tracked by this crate (creation and deletion of queues, Doorbell Buffer Config,
    /// Asynchronous Event Request) are rejected.
    pub fn submit_admin(
        &mut self,
        now: Instant,
        token: u64,
        command: Command,
        data: Option<Segment>,
    ) -> Result<(), RequestError> {
        self.submit_admin_within(now, None, token, command, data)
    }

    /// Like [`submit_admin`](Self::submit_admin), with an individual timeout: a format or sanitize may
    /// take hours.
    pub fn submit_admin_within(
        &mut self,
        now: Instant,
        timeout: Option<Span>,
        token: u64,
        command: Command,
        data: Option<Segment>,
    ) -> Result<(), RequestError> {
        reject_driver_opcode(command.opcode())?;
        if !matches!(self.phase, Phase::Ready) {
            return Err(RequestError::NotReady);
        }
        let is_one_abort_too_many =
            command.opcode() == AdminOpcode::Abort.code() && !self.can_abort();
        if !self.admin.has_owner_slot() || is_one_abort_too_many {
            return Err(RequestError::Full);
        }
        let (pointer, list) = match data.filter(|data| data.len_bytes > 0) {
            Some(data) => {
                self.refuse_if_too_long(data)?;
                self.admin.pointers.build(data)?
            }
            None => Default::default(),
        };
        if !self.admin.submit_for_owner(now, token, (command, pointer), list, timeout) {
            self.admin.pointers.release_list(list);
            return Err(RequestError::Full);
        }
        Ok(())
    }

    fn refuse_if_too_long(&self, data: Segment) -> Result<(), RequestError> {
        let limit = self.identity.as_ref().and_then(|identity| identity.limits.transfer_bytes_max);
        let (what, found, max) = ("the data's length", data.len_bytes.into(), limit);
        match max {
            Some(max) if found > max => Err(RequestError::OutOfRange { what, found, min: 1, max }),
            _ => Ok(()),
        }
    }

    /// Requests an abort of the command with `token`. The status of that command shows the effect; the
    /// Abort itself completes with `abort_token`.
    pub fn submit_abort_admin(
        &mut self,
        now: Instant,
        abort_token: u64,
        token: u64,
    ) -> Result<(), RequestError> {
        let abort_cid = self.admin.cid_of(token).ok_or(RequestError::NoSuchToken { token })?;
        self.submit_admin(now, abort_token, Abort { sqid: 0, abort_cid }.to_command(), None)
    }

    /// Reads `data.len_bytes` of a log page; the offset is in `log`.
    pub fn submit_get_log_page(
        &mut self,
        now: Instant,
        token: u64,
        log: GetLogPage,
        data: Segment,
    ) -> Result<(), RequestError> {
        if data.len_bytes == 0 || !data.len_bytes.is_multiple_of(4) {
            let (what, found) = ("the log page's length", data.len_bytes.into());
            return Err(RequestError::OutOfRange {
                what,
                found,
                min: 4,
                max: u64::from(u32::MAX) & !3,
            });
        }
        let log = GetLogPage { numd: tenmil_wire::admin::numd_of_bytes(data.len_bytes), ..log };
        self.submit_admin(now, token, log.to_command(), Some(data))
    }

    /// Submits an Identify command; its data has 4096 bytes.
    pub fn submit_identify(
        &mut self,
        now: Instant,
        token: u64,
        identify: Identify,
        data: Segment,
    ) -> Result<(), RequestError> {
        let (what, found) = ("the length of an answer to Identify", data.len_bytes.into());
        if found != tenmil_wire::identify::BYTES as u64 {
            return Err(RequestError::OutOfRange { what, found, min: 4096, max: 4096 });
        }
        self.submit_admin(now, token, identify.to_command(), Some(data))
    }

    /// Reads a feature; small values are returned in the result.
    pub fn submit_get_features(
        &mut self,
        now: Instant,
        token: u64,
        features: GetFeatures,
        data: Option<Segment>,
    ) -> Result<(), RequestError> {
        self.submit_admin(now, token, features.to_command(), data)
    }

    /// Sets a feature.
    pub fn submit_set_features(
        &mut self,
        now: Instant,
        token: u64,
        features: SetFeatures,
        data: Option<Segment>,
    ) -> Result<(), RequestError> {
        self.submit_admin(now, token, features.to_command(), data)
    }

    /// Formats a namespace, or all of them, within `timeout`. All data is lost.
    pub fn submit_format(
        &mut self,
        now: Instant,
        timeout: Span,
        token: u64,
        format: FormatNvm,
    ) -> Result<(), RequestError> {
        self.refuse_unless(AdminOpcode::FormatNvm, |page| page.format())?;
        self.submit_admin_within(now, Some(timeout), token, format.to_command(), None)
    }

    /// Creates a namespace described by `data` (4096 bytes). The result is its identifier.
    pub fn submit_create_namespace(
        &mut self,
        now: Instant,
        token: u64,
        data: Segment,
    ) -> Result<(), RequestError> {
        self.refuse_unless(AdminOpcode::NamespaceManagement, |page| page.namespace_management())?;
        let command =
            NamespaceManagement { sel: ManagementSelect::Create, ..NamespaceManagement::default() };
        self.submit_admin(now, token, command.to_command(), Some(data))
    }

    /// Deletes a namespace and all its data.
    pub fn submit_delete_namespace(
        &mut self,
        now: Instant,
        token: u64,
        id: u32,
    ) -> Result<(), RequestError> {
        self.refuse_unless(AdminOpcode::NamespaceManagement, |page| page.namespace_management())?;
        let sel = ManagementSelect::Delete;
        let command = NamespaceManagement { nsid: id, sel, ..NamespaceManagement::default() };
        self.submit_admin(now, token, command.to_command(), None)
    }

    /// Attaches a namespace to the controllers listed in `data`, or detaches it from them.
    pub fn submit_namespace_attachment(
        &mut self,
        now: Instant,
        token: u64,
        id: u32,
        select: AttachmentSelect,
        data: Segment,
    ) -> Result<(), RequestError> {
        self.refuse_unless(AdminOpcode::NamespaceAttachment, |page| page.namespace_management())?;
        let command = NamespaceAttachment { nsid: id, sel: select };
        self.submit_admin(now, token, command.to_command(), Some(data))
    }

    /// Commands that download a firmware image to the controller, for
    /// [`submit_admin`](Self::submit_admin); [`submit_firmware_commit`](Self::submit_firmware_commit) follows.
    pub fn firmware_download_commands(
        &self,
        image: Segment,
    ) -> Result<FirmwareDownloadCommands, RequestError> {
        self.refuse_unless(AdminOpcode::FirmwareImageDownload, |page| page.firmware())?;
        let identity = self.identity.as_ref().ok_or(RequestError::NotReady)?;
        FirmwareDownloadCommands::new(image, &identity.limits)
    }

    /// Commits the downloaded image to a slot, or activates a slot.
    pub fn submit_firmware_commit(
        &mut self,
        now: Instant,
        token: u64,
        slot: u8,
        action: CommitAction,
    ) -> Result<(), RequestError> {
        self.refuse_unless(AdminOpcode::FirmwareCommit, |page| page.firmware())?;
        if slot > 7 {
            let (what, found) = ("firmware slot", slot.into());
            return Err(RequestError::OutOfRange { what, found, min: 0, max: 7 });
        }
        let command = FirmwareCommit { fs: slot, ca: action, bpid: false };
        self.submit_admin(now, token, command.to_command(), None)
    }

    /// Starts or aborts a self-test of the controller and, depending on `namespace`, of namespaces.
    pub fn submit_self_test(
        &mut self,
        now: Instant,
        token: u64,
        namespace: u32,
        code: SelfTestCode,
    ) -> Result<(), RequestError> {
        self.refuse_unless(AdminOpcode::DeviceSelfTest, |page| page.self_test())?;
        let command = DeviceSelfTest { nsid: namespace, stc: code, dstp: 0 };
        self.submit_admin(now, token, command.to_command(), None)
    }

    fn refuse_unless(
        &self,
        opcode: AdminOpcode,
        has: impl Fn(&tenmil_wire::identify::IdentifyController) -> bool,
    ) -> Result<(), RequestError> {
        match &self.identity {
            None => Err(RequestError::NotReady),
            Some(identity) if has(&identity.page) => Ok(()),
            Some(_) => Err(RequestError::Unsupported { command: opcode.name() }),
        }
    }
}

fn reject_driver_opcode(opcode: u8) -> Result<(), RequestError> {
    match AdminOpcode::from_u8(opcode) {
        Some(
            ours @ (AdminOpcode::CreateIoSubmissionQueue
            | AdminOpcode::CreateIoCompletionQueue
            | AdminOpcode::DeleteIoSubmissionQueue
            | AdminOpcode::DeleteIoCompletionQueue
            | AdminOpcode::DoorbellBufferConfig
            | AdminOpcode::AsynchronousEventRequest),
        ) => Err(RequestError::Reserved { command: ours.name() }),
        _ => Ok(()),
    }
}
