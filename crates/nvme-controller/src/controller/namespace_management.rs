//! Namespace Management and Namespace Attachment (Base 2.1 §5.1.20, §5.1.21, §8.1.15).

use tenmil_wire::Status;
use tenmil_wire::admin::{
    AttachmentSelect, ManagementSelect, NamespaceAttachment, NamespaceManagement,
};

use super::Controller;
use super::commands::{CommandResult, PAGE_BYTES};
use super::subsystem::{NamespaceEntry, SubsystemState};
use super::transport_interface::{AdminDataTransfer, AdminOutcome, AdminResult};
use crate::namespace::NamespaceIdentity;

/// Maximum identifiers in a controller list (Base 2.1 §4.4.1).
const CONTROLLERS_MAX: usize = 2047;

/// Requested properties of a new namespace (Base 2.1 §5.1.21, NVM 1.1 §4.1.6).
///
/// ```text
///   0      8      16      26    27   29   30    31      92     96      100     102     104
///   | NSZE | NCAP |       |FLBAS|    |DPS |NMIC |       |ANAGRP|       |NVMSET |ENDGRP |
/// ```
struct CreateNamespaceRequest {
    block_count: u64,
    block_size: u32,
    is_shared: bool,
    ana_group: u32,
}

impl Controller {
    pub(super) fn namespace_management_data_length(
        &self,
        management: &NamespaceManagement,
    ) -> Result<AdminDataTransfer, Status> {
        match management.sel {
            ManagementSelect::Create => Ok(AdminDataTransfer::FromHost(PAGE_BYTES)),
            ManagementSelect::Delete => Ok(AdminDataTransfer::None),
            ManagementSelect::Reserved(_) => Err(Status::INVALID_FIELD),
        }
    }

    pub(super) fn execute_namespace_management(
        &mut self,
        management: &NamespaceManagement,
        data: &[u8],
    ) -> CommandResult {
        match management.sel {
            ManagementSelect::Create => self.create_namespace(management, data),
            ManagementSelect::Delete => self.delete_namespaces(management.nsid),
            ManagementSelect::Reserved(_) => Err(Status::INVALID_FIELD),
        }
    }

    fn create_namespace(&self, management: &NamespaceManagement, data: &[u8]) -> CommandResult {
        if management.nsid != 0 {
            return Err(Status::INVALID_FIELD);
        }
        // Only the NVM command set (CSI 0) is supported.
        if management.csi != 0 {
            return Err(Status::COMMAND_SET_NOT_SUPPORTED);
        }
        let request = self.parse_create_request(data)?;
        let mut state = self.subsystem.lock_state();
        let nsid = state.lowest_free_nsid().ok_or(Status::NAMESPACE_IDENTIFIER_UNAVAILABLE)?;
        let identity = self.subsystem.namespace_identity(nsid, NamespaceIdentity::default());
        state.create_namespace(nsid, request.block_size, request.block_count, |record| {
            record.identity = identity;
            record.is_shared = request.is_shared;
            record.ana_group = request.ana_group;
        })?;
        self.subsystem.publish_and_notify(state);
        Ok(AdminOutcome::Done(AdminResult::success_with(nsid)))
    }

    /// Decodes and checks the create data.
    fn parse_create_request(&self, data: &[u8]) -> Result<CreateNamespaceRequest, Status> {
        let field = |at: usize| u64_at_offset(data, at);
        let info = self.subsystem.constants();
        let [flbas, dps, nmic] = [26, 29, 30].map(|at| data.get(at).copied().unwrap_or(0));
        let sizes = &info.pool_block_sizes;
        let index = usize::from(flbas & 0xf | (flbas & 0x60) >> 1);
        let block_size = *sizes.get(index).ok_or(Status::INVALID_FORMAT)?;
        if flbas & 0x10 != 0 || dps != 0 {
            return Err(Status::INVALID_FORMAT);
        }
        let (block_count, capacity) = (field(0), field(8));
        if capacity != block_count {
            return Err(Status::THIN_PROVISIONING_NOT_SUPPORTED);
        }
        // Bit 0 of NMIC is Shared; NVM sets and endurance groups are not supported.
        let ana_group = u32::try_from(field(92) & 0xffff_ffff).unwrap_or(0);
        if block_count == 0 || nmic & !1 != 0 || field(100) & 0xffff_ffff != 0 {
            return Err(Status::INVALID_FIELD);
        }
        if ana_group > info.ana_groups {
            return Err(Status::ANA_GROUP_IDENTIFIER_INVALID);
        }
        Ok(CreateNamespaceRequest {
            block_count,
            block_size,
            is_shared: nmic & 1 != 0,
            ana_group: ana_group.max(1),
        })
    }

    fn delete_namespaces(&mut self, nsid: u32) -> CommandResult {
        let subsystem = self.subsystem.clone();
        let mut state = subsystem.lock_state();
        let cntlid = self.config.cntlid;
        let nsids: Vec<u32> = match nsid {
            u32::MAX => state.visible_namespaces(cntlid).map(|record| record.nsid).collect(),
            nsid => vec![nsid],
        };
        for nsid in &nsids {
            let record = state.visible_namespace(cntlid, *nsid);
            let record = record.ok_or(Status::INVALID_NAMESPACE_OR_FORMAT)?;
            self.check_writable(&state, record)?;
        }
        for nsid in nsids {
            state.delete_namespace(nsid);
        }
        subsystem.publish_and_notify(state);
        Ok(AdminOutcome::Done(AdminResult::OK))
    }

    pub(super) fn execute_namespace_attachment(
        &mut self,
        attachment: &NamespaceAttachment,
        data: &[u8],
    ) -> CommandResult {
        let subsystem = self.subsystem.clone();
        let mut state = subsystem.lock_state();
        let nsid = attachment.nsid;
        let record = state.visible_namespace(self.config.cntlid, nsid);
        let record = record.ok_or(Status::INVALID_NAMESPACE_OR_FORMAT)?;
        let cntlids = parse_controller_list(data, &state)?;
        match attachment.sel {
            AttachmentSelect::Attach => {
                check_attachable(record, &cntlids)?;
                state.attach_namespace(nsid, &cntlids);
            }
            AttachmentSelect::Detach => {
                if cntlids.iter().any(|cntlid| !record.visibility.is_attached_to(*cntlid)) {
                    return Err(Status::NAMESPACE_NOT_ATTACHED);
                }
                self.check_may_change_namespace(&state, record)?;
                state.detach_namespace(nsid, &cntlids);
            }
            AttachmentSelect::Reserved(_) => return Err(Status::INVALID_FIELD),
        }
        subsystem.publish_and_notify(state);
        Ok(AdminOutcome::Done(AdminResult::OK))
    }
}

/// Checks that a namespace may be attached to these controllers (Base 2.1 §5.1.20.1).
fn check_attachable(record: &NamespaceEntry, cntlids: &[u16]) -> Result<(), Status> {
    if cntlids.iter().any(|cntlid| record.visibility.is_attached_to(*cntlid)) {
        return Err(Status::NAMESPACE_ALREADY_ATTACHED);
    }
    if cntlids.iter().any(|cntlid| !record.visibility.is_visible_to(*cntlid)) {
        return Err(Status::CONTROLLER_LIST_INVALID);
    }
    if !record.is_shared && record.visibility.attached_count() + cntlids.len() > 1 {
        return Err(Status::NAMESPACE_IS_PRIVATE);
    }
    Ok(())
}

/// Decodes a controller list: identifiers in ascending order, all of existing controllers (Base 2.1
/// §4.4.1).
fn parse_controller_list(data: &[u8], state: &SubsystemState) -> Result<Vec<u16>, Status> {
    let mut words = data.as_chunks::<2>().0.iter().map(|word| u16::from_le_bytes(*word));
    let count = usize::from(words.next().unwrap_or(0));
    if !(1..=CONTROLLERS_MAX).contains(&count) {
        return Err(Status::CONTROLLER_LIST_INVALID);
    }
    let cntlids: Vec<u16> = words.take(count).collect();
    let is_ascending = cntlids.windows(2).all(|pair| pair[0] < pair[1]);
    let all_exist = cntlids.iter().all(|cntlid| state.controllers.contains_key(cntlid));
    if is_ascending && all_exist { Ok(cntlids) } else { Err(Status::CONTROLLER_LIST_INVALID) }
}

/// Eight little-endian bytes; bytes past the end are zeroes.
fn u64_at_offset(data: &[u8], at: usize) -> u64 {
    let mut bytes = [0; 8];
    for (byte, found) in bytes.iter_mut().zip(data.iter().skip(at)) {
        *byte = *found;
    }
    u64::from_le_bytes(bytes)
}
