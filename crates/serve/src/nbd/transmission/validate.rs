//! Validation of a request before any resource is used for it.

use tenmil_base::{Operation, RequestFlags};
use tenmil_wire::nbd::{Command, CommandFlags, ErrorCode, RequestHeader, TransmissionFlags};

use super::super::export::Export;
use super::super::negotiation::NegotiatedOptions;
use super::super::reply::RequestFailure;

/// Processing that a valid request requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ValidatedRequest {
    /// An I/O request.
    Run {
        /// Operation to submit.
        operation: Operation,
        /// Its flags.
        flags: RequestFlags,
    },
    /// Nothing: the request is complete.
    Nothing,
    /// A block status query.
    Survey,
    /// A resize query.
    Resize {
        /// New size in bytes.
        bytes: u64,
    },
    /// The end of the connection (`NBD_CMD_DISC`).
    End,
}

/// Validates a request header: known command, allowed flags, and a range within the export.
#[inline]
pub(super) fn validate_request(
    export: &Export,
    options: NegotiatedOptions,
    header: &RequestHeader,
) -> Result<ValidatedRequest, RequestFailure> {
    let RequestHeader { flags, command, len_bytes, .. } = *header;
    if command == Command::DISC {
        return Ok(ValidatedRequest::End);
    }
    let (operation, events) = command_requirements(command, options)?;
    check_flags(export, options, command, flags)?;
    let writes = matches!(command, Command::WRITE | Command::TRIM | Command::WRITE_ZEROES);
    if writes && export.is_read_only() {
        return Err(RequestFailure::new(ErrorCode::EPERM, "the export is read-only"));
    }
    if !export.transmission_flags(options.structured).has(events) {
        return Err(RequestFailure::new(ErrorCode::EINVAL, "the export cannot do this"));
    }
    if command == Command::RESIZE {
        return validate_resize(export, header);
    }
    if command != Command::FLUSH {
        check_range(export, header)?;
        if len_bytes == 0 {
            return Ok(ValidatedRequest::Nothing);
        }
    }
    let Some(operation) = operation else { return Ok(ValidatedRequest::Survey) };
    let forced = writes && flags.has(CommandFlags::FUA);
    let holes = command == Command::WRITE_ZEROES && !flags.has(CommandFlags::NO_HOLE);
    let flags = if forced { RequestFlags::FUA } else { RequestFlags::NONE };
    let flags = if holes { flags.union(RequestFlags::DEALLOCATE) } else { flags };
    Ok(ValidatedRequest::Run { operation, flags })
}

/// Maps a command to the operation it requires (`None` for a slow query) and the transmission flag
/// that advertises it.
fn command_requirements(
    command: Command,
    options: NegotiatedOptions,
) -> Result<(Option<Operation>, TransmissionFlags), RequestFailure> {
    use TransmissionFlags as Told;
    Ok(match command {
        Command::READ => (Some(Operation::Read), Told::HAS_FLAGS),
        Command::WRITE => (Some(Operation::Write), Told::HAS_FLAGS),
        Command::FLUSH => (Some(Operation::Flush), Told::SEND_FLUSH),
        Command::TRIM => (Some(Operation::Deallocate), Told::SEND_TRIM),
        Command::CACHE => (Some(Operation::Verify), Told::SEND_CACHE),
        Command::WRITE_ZEROES => (Some(Operation::WriteZeroes), Told::SEND_WRITE_ZEROES),
        Command::RESIZE => (None, Told::SEND_RESIZE),
        Command::BLOCK_STATUS if options.allocation => (None, Told::HAS_FLAGS),
        Command::BLOCK_STATUS => {
            let text = "no metadata context was chosen";
            return Err(RequestFailure::new(ErrorCode::EINVAL, text));
        }
        _ => return Err(RequestFailure::new(ErrorCode::EINVAL, "there is no such command")),
    })
}

/// Checks the command flags ("Command flags"): each belongs to one command, except FUA, which every
/// command may carry if the export advertises it.
fn check_flags(
    export: &Export,
    options: NegotiatedOptions,
    command: Command,
    flags: CommandFlags,
) -> Result<(), RequestFailure> {
    let events = export.transmission_flags(options.structured);
    let mut known = match command {
        Command::READ if options.structured => CommandFlags::DF,
        Command::WRITE_ZEROES => {
            let fast = events.has(TransmissionFlags::SEND_FAST_ZERO);
            CommandFlags::NO_HOLE.union_if(fast, CommandFlags::FAST_ZERO)
        }
        Command::BLOCK_STATUS => CommandFlags::REQ_ONE,
        _ => CommandFlags::NONE,
    };
    known = known.union_if(events.has(TransmissionFlags::SEND_FUA), CommandFlags::FUA);
    if flags.without(known) == CommandFlags::NONE {
        return Ok(());
    }
    Err(RequestFailure::new(ErrorCode::EINVAL, "a flag does not belong to this command"))
}

/// Checks a resize request. The extension only defines that the command exists. Here the offset
/// field carries the new size and the length must be zero; any other encoding is rejected.
fn validate_resize(
    export: &Export,
    header: &RequestHeader,
) -> Result<ValidatedRequest, RequestFailure> {
    let RequestHeader { offset, len_bytes, .. } = *header;
    if len_bytes != 0 {
        return Err(RequestFailure::new(ErrorCode::EINVAL, "a new size has no length"));
    }
    if offset == 0 || !offset.is_multiple_of(u64::from(export.block_size())) {
        let text = "a new size is a multiple of the smallest block";
        return Err(RequestFailure::new(ErrorCode::EINVAL, text));
    }
    Ok(ValidatedRequest::Resize { bytes: offset })
}

fn check_range(export: &Export, header: &RequestHeader) -> Result<(), RequestFailure> {
    let RequestHeader { command, offset, len_bytes, .. } = *header;
    let moves = matches!(command, Command::READ | Command::WRITE);
    if moves && len_bytes > export.payload_bytes_max() {
        return Err(RequestFailure::new(ErrorCode::EINVAL, "longer than the largest block"));
    }
    let end = offset.checked_add(u64::from(len_bytes));
    if end.is_none_or(|end| end > export.size_bytes()) {
        let grows = matches!(command, Command::WRITE | Command::WRITE_ZEROES);
        let error = if grows { ErrorCode::ENOSPC } else { ErrorCode::EINVAL };
        return Err(RequestFailure::new(error, "past the end of the export"));
    }
    if command == Command::BLOCK_STATUS {
        return if len_bytes == 0 {
            Err(RequestFailure::new(ErrorCode::EINVAL, "the request has no length"))
        } else {
            Ok(())
        };
    }
    let mask = u64::from(export.block_size()) - 1;
    if (offset | u64::from(len_bytes)) & mask != 0 {
        return Err(RequestFailure::new(ErrorCode::EINVAL, "not a multiple of the smallest block"));
    }
    Ok(())
}
