//! What the payloads of messages say, and whether it makes sense.

use crate::bytes::Fields;
use crate::code::{Code, Rule};
use crate::inbox::Message;
use crate::request::{Call, MemoryArea, MemoryChange, Request};
use crate::ring::QUEUE_SIZE_MAX;
use crate::violation::Violation;

pub(crate) fn refused(
    code: Code,
    field: &'static str,
    found: u64,
    expected: &'static str,
) -> Violation {
    Violation::Field { code, field, found, expected }
}

pub(crate) fn check_files(rule: &Rule, found: usize) -> Result<(), Violation> {
    let (least, most) = rule.files;
    if (least..=most).contains(&found) {
        return Ok(());
    }
    Err(Violation::Files { code: rule.code, found, expected: rule.files })
}

/// Reads a stretch of memory.
pub(crate) fn area(code: Code, fields: &mut Fields<'_>) -> Result<MemoryArea, Violation> {
    let (guest, len_bytes, user) = (fields.u64(), fields.u64(), fields.u64());
    let file_offset = fields.u64();
    for (field, begin) in
        [("guest address", guest), ("user address", user), ("file offset", file_offset)]
    {
        if begin.checked_add(len_bytes).is_none() {
            return Err(refused(code, field, begin, "an end that is an address"));
        }
    }
    if len_bytes == 0 {
        return Err(refused(code, "size", len_bytes, "some memory"));
    }
    Ok(MemoryArea { guest, len_bytes, user, file_offset })
}

/// Reads an ADD_MEM_REG or a REM_MEM_REG.
pub(crate) fn memory_piece<F>(call: Call, message: Message<F>) -> Result<Request<F>, Violation> {
    let code = call.code;
    let mut fields = Fields(&message.payload);
    let _ = fields.u64();
    let area = area(code, &mut fields)?;
    let change = match (code, message.files.into_iter().next()) {
        (Code::ADD_MEM_REG, Some(file)) => MemoryChange::Add(area, file),
        // Some send the descriptor along; it is closed.
        _ => MemoryChange::Remove(area),
    };
    Ok(Request::Memory { call, change })
}

pub(crate) fn inflight_question<F>(
    call: Call,
    message: &Message<F>,
) -> Result<Request<F>, Violation> {
    let mut fields = Fields(&message.payload);
    let (_, _) = (fields.u64(), fields.u64());
    let (queues, size) = (fields.u16(), fields.u16());
    check_inflight(call.code, queues, size)?;
    Ok(Request::MakeInflight { call, queues, size })
}

pub(crate) fn check_inflight(code: Code, queues: u16, size: u16) -> Result<(), Violation> {
    if queues == 0 || queues > 256 {
        return Err(refused(code, "queues", queues.into(), "1 to 256"));
    }
    if size == 0 || size > QUEUE_SIZE_MAX {
        return Err(refused(code, "queue size", size.into(), "1 to 1024"));
    }
    Ok(())
}
