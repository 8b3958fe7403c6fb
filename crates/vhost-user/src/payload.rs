//! Parsing and validation of payloads.

use crate::message_parser::Message;
use crate::message_types::{MessageRule, MessageType};
use crate::payload_reader::PayloadReader;
use crate::request::{MemoryChange, MemoryRegionDesc, OwnerRequest, PendingReply};
use crate::violation::Violation;
use crate::vring::QUEUE_SIZE_MAX;

pub(crate) fn field_violation(
    code: MessageType,
    field: &'static str,
    found: u64,
    expected: &'static str,
) -> Violation {
    Violation::Field { code, field, found, expected }
}

pub(crate) fn check_files(rule: &MessageRule, found: usize) -> Result<(), Violation> {
    let (least, most) = rule.with_files;
    if (least..=most).contains(&found) {
        return Ok(());
    }
    Err(Violation::Files { code: rule.code, found, expected: rule.with_files })
}

/// Parses a memory region description.
pub(crate) fn parse_memory_region(
    code: MessageType,
    fields: &mut PayloadReader<'_>,
) -> Result<MemoryRegionDesc, Violation> {
    let (guest, len_bytes, user) = (fields.u64(), fields.u64(), fields.u64());
    let file_offset = fields.u64();
    for (field, begin) in
        [("guest address", guest), ("user address", user), ("file offset", file_offset)]
    {
        if begin.checked_add(len_bytes).is_none() {
            return Err(field_violation(code, field, begin, "an end that is an address"));
        }
    }
    if len_bytes == 0 {
        return Err(field_violation(code, "size", len_bytes, "some memory"));
    }
    Ok(MemoryRegionDesc { guest, len_bytes, user, file_offset })
}

/// Parses ADD_MEM_REG or REM_MEM_REG.
pub(crate) fn parse_memory_change<F>(
    call: PendingReply,
    message: Message<F>,
) -> Result<OwnerRequest<F>, Violation> {
    let code = call.code;
    let mut fields = PayloadReader(&message.payload);
    let _ = fields.u64();
    let area = parse_memory_region(code, &mut fields)?;
    let change = match (code, message.files.into_iter().next()) {
        (MessageType::ADD_MEM_REG, Some(file)) => MemoryChange::Add(area, file),
        // Some front ends attach the descriptor to the removal; it is closed.
        _ => MemoryChange::Remove(area),
    };
    Ok(OwnerRequest::Memory { call, change })
}

pub(crate) fn parse_get_inflight<F>(
    call: PendingReply,
    message: &Message<F>,
) -> Result<OwnerRequest<F>, Violation> {
    let mut fields = PayloadReader(&message.payload);
    let (_, _) = (fields.u64(), fields.u64());
    let (queues, size) = (fields.u16(), fields.u16());
    check_inflight_buffer(call.code, queues, size)?;
    Ok(OwnerRequest::GetInflightFd { call, queues, size })
}

pub(crate) fn check_inflight_buffer(
    code: MessageType,
    queues: u16,
    size: u16,
) -> Result<(), Violation> {
    if queues == 0 || queues > 256 {
        return Err(field_violation(code, "queues", queues.into(), "1 to 256"));
    }
    if size == 0 || size > QUEUE_SIZE_MAX {
        return Err(field_violation(code, "queue size", size.into(), "1 to 1024"));
    }
    Ok(())
}
