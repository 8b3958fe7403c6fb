//! What the owner of a controller may ask of it: any admin command there is, with the common ones
//! made easy.
//!
//! Every command goes through [`Controller::submit_admin`] and ends with
//! [`Event::AdminCompleted`](crate::Event::AdminCompleted). Until then the controller may touch the
//! memory that was named.

use base::{Dma, Instant, Mmio, Segment, Span};
use wire::admin::{
    Abort, AttachmentSelect, CommitAction, DeviceSelfTest, FirmwareCommit, FormatNvm, GetFeatures,
    GetLogPage, Identify, ManagementSelect, NamespaceAttachment, NamespaceManagement, SelfTestCode,
    SetFeatures,
};
use wire::{AdminOpcode, Command, Typed};

use super::{Controller, FirmwareChunks, Phase};
use crate::error::Refusal;

impl<M: Mmio, D: Dma> Controller<M, D> {
    /// Sends a command as it is, with its data at `data`. The command's identifier and data pointer
    /// are filled in here.
    ///
    /// Commands that this crate keeps account of (those that make and delete queues, Doorbell
    /// Buffer Config, Asynchronous Event Request) are refused: they would break that account.
    pub fn submit_admin(
        &mut self,
        now: Instant,
        token: u64,
        command: Command,
        data: Option<Segment>,
    ) -> Result<(), Refusal> {
        self.submit_admin_within(now, None, token, command, data)
    }

    /// As [`submit_admin`](Self::submit_admin), with a time limit of its own: a format or a
    /// sanitize may take hours.
    pub fn submit_admin_within(
        &mut self,
        now: Instant,
        timeout: Option<Span>,
        token: u64,
        command: Command,
        data: Option<Segment>,
    ) -> Result<(), Refusal> {
        refuse_if_ours(command.opcode())?;
        if !matches!(self.phase, Phase::Ready) {
            return Err(Refusal::NotReady);
        }
        let is_one_abort_too_many =
            command.opcode() == AdminOpcode::Abort.code() && !self.can_abort();
        if !self.admin.has_room_for_owner() || is_one_abort_too_many {
            return Err(Refusal::Full);
        }
        let (command, list) = match data.filter(|data| data.len_bytes > 0) {
            Some(data) => {
                self.refuse_if_too_long(data)?;
                self.admin.lists.point(command, data)?
            }
            None => (command, None),
        };
        if !self.admin.send_for_owner(now, token, command, list, timeout) {
            self.admin.lists.give_back(list);
            return Err(Refusal::Full);
        }
        Ok(())
    }

    fn refuse_if_too_long(&self, data: Segment) -> Result<(), Refusal> {
        let limit = self.identity.as_ref().and_then(|identity| identity.limits.transfer_bytes_max);
        let (what, found, max) = ("the data's length", data.len_bytes.into(), limit);
        match max {
            Some(max) if found > max => Err(Refusal::OutOfRange { what, found, min: 1, max }),
            _ => Ok(()),
        }
    }

    /// Asks the controller to abort the command with `token`. Whether it does shows in how that
    /// command ends; the answer to the Abort itself comes under `abort_token`.
    pub fn abort_admin(
        &mut self,
        now: Instant,
        abort_token: u64,
        token: u64,
    ) -> Result<(), Refusal> {
        let abort_cid = self.admin.cid_of(token).ok_or(Refusal::NoSuchToken { token })?;
        self.submit_admin(now, abort_token, Abort { sqid: 0, abort_cid }.to_command(), None)
    }

    /// Reads `data.len_bytes` of a log page, from `offset_bytes` on.
    pub fn get_log_page(
        &mut self,
        now: Instant,
        token: u64,
        log: GetLogPage,
        data: Segment,
    ) -> Result<(), Refusal> {
        if data.len_bytes == 0 || !data.len_bytes.is_multiple_of(4) {
            let (what, found) = ("the log page's length", data.len_bytes.into());
            return Err(Refusal::OutOfRange { what, found, min: 4, max: u64::from(u32::MAX) & !3 });
        }
        let log = GetLogPage { numd: wire::admin::numd(data.len_bytes), ..log };
        self.submit_admin(now, token, log.to_command(), Some(data))
    }

    /// Asks Identify; the answer takes 4096 bytes.
    pub fn submit_identify(
        &mut self,
        now: Instant,
        token: u64,
        identify: Identify,
        data: Segment,
    ) -> Result<(), Refusal> {
        let (what, found) = ("the length of an answer to Identify", data.len_bytes.into());
        if found != wire::identify::BYTES as u64 {
            return Err(Refusal::OutOfRange { what, found, min: 4096, max: 4096 });
        }
        self.submit_admin(now, token, identify.to_command(), Some(data))
    }

    /// Reads a feature; small ones come as the answer's result.
    pub fn get_features(
        &mut self,
        now: Instant,
        token: u64,
        features: GetFeatures,
        data: Option<Segment>,
    ) -> Result<(), Refusal> {
        self.submit_admin(now, token, features.to_command(), data)
    }

    /// Sets a feature.
    pub fn set_features(
        &mut self,
        now: Instant,
        token: u64,
        features: SetFeatures,
        data: Option<Segment>,
    ) -> Result<(), Refusal> {
        self.submit_admin(now, token, features.to_command(), data)
    }

    /// Formats a namespace, or all of them, within `timeout`. What is on it is lost.
    pub fn format(
        &mut self,
        now: Instant,
        timeout: Span,
        token: u64,
        format: FormatNvm,
    ) -> Result<(), Refusal> {
        self.refuse_unless(AdminOpcode::FormatNvm, |page| page.format())?;
        self.submit_admin_within(now, Some(timeout), token, format.to_command(), None)
    }

    /// Creates a namespace as `data` describes it (4096 bytes). Its identifier is the result.
    pub fn create_namespace(
        &mut self,
        now: Instant,
        token: u64,
        data: Segment,
    ) -> Result<(), Refusal> {
        self.refuse_unless(AdminOpcode::NamespaceManagement, |page| page.namespace_management())?;
        let command =
            NamespaceManagement { sel: ManagementSelect::Create, ..NamespaceManagement::default() };
        self.submit_admin(now, token, command.to_command(), Some(data))
    }

    /// Deletes a namespace and everything on it.
    pub fn delete_namespace(&mut self, now: Instant, token: u64, id: u32) -> Result<(), Refusal> {
        self.refuse_unless(AdminOpcode::NamespaceManagement, |page| page.namespace_management())?;
        let sel = ManagementSelect::Delete;
        let command = NamespaceManagement { nsid: id, sel, ..NamespaceManagement::default() };
        self.submit_admin(now, token, command.to_command(), None)
    }

    /// Attaches a namespace to the controllers listed in `data`, or detaches it from them.
    pub fn attach_namespace(
        &mut self,
        now: Instant,
        token: u64,
        id: u32,
        select: AttachmentSelect,
        data: Segment,
    ) -> Result<(), Refusal> {
        self.refuse_unless(AdminOpcode::NamespaceAttachment, |page| page.namespace_management())?;
        let command = NamespaceAttachment { nsid: id, sel: select };
        self.submit_admin(now, token, command.to_command(), Some(data))
    }

    /// The commands that bring a firmware image to the controller, for
    /// [`submit_admin`](Self::submit_admin); [`commit_firmware`](Self::commit_firmware) follows.
    pub fn firmware_chunks(&self, image: Segment) -> Result<FirmwareChunks, Refusal> {
        self.refuse_unless(AdminOpcode::FirmwareImageDownload, |page| page.firmware())?;
        let identity = self.identity.as_ref().ok_or(Refusal::NotReady)?;
        FirmwareChunks::new(image, &identity.limits)
    }

    /// Puts the downloaded image into a slot, or activates what is there.
    pub fn commit_firmware(
        &mut self,
        now: Instant,
        token: u64,
        slot: u8,
        action: CommitAction,
    ) -> Result<(), Refusal> {
        self.refuse_unless(AdminOpcode::FirmwareCommit, |page| page.firmware())?;
        if slot > 7 {
            let (what, found) = ("firmware slot", slot.into());
            return Err(Refusal::OutOfRange { what, found, min: 0, max: 7 });
        }
        let command = FirmwareCommit { fs: slot, ca: action, bpid: false };
        self.submit_admin(now, token, command.to_command(), None)
    }

    /// Starts or stops a self-test of the controller and, if `namespace` says so, of namespaces.
    pub fn self_test(
        &mut self,
        now: Instant,
        token: u64,
        namespace: u32,
        code: SelfTestCode,
    ) -> Result<(), Refusal> {
        self.refuse_unless(AdminOpcode::DeviceSelfTest, |page| page.self_test())?;
        let command = DeviceSelfTest { nsid: namespace, stc: code, dstp: 0 };
        self.submit_admin(now, token, command.to_command(), None)
    }

    fn refuse_unless(
        &self,
        opcode: AdminOpcode,
        has: impl Fn(&wire::identify::IdentifyController) -> bool,
    ) -> Result<(), Refusal> {
        match &self.identity {
            None => Err(Refusal::NotReady),
            Some(identity) if has(&identity.page) => Ok(()),
            Some(_) => Err(Refusal::Unsupported { command: opcode.name() }),
        }
    }
}

fn refuse_if_ours(opcode: u8) -> Result<(), Refusal> {
    match AdminOpcode::from_u8(opcode) {
        Some(
            ours @ (AdminOpcode::CreateIoSubmissionQueue
            | AdminOpcode::CreateIoCompletionQueue
            | AdminOpcode::DeleteIoSubmissionQueue
            | AdminOpcode::DeleteIoCompletionQueue
            | AdminOpcode::DoorbellBufferConfig
            | AdminOpcode::AsynchronousEventRequest),
        ) => Err(Refusal::Reserved { command: ours.name() }),
        _ => Ok(()),
    }
}
