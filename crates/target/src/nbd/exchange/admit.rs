//! Whether a request can be done, before anything is done for it.

use base::{Flags, Operation};
use wire::nbd::{Command, CommandFlags, ErrorCode, RequestHeader, TransmissionFlags};

use super::super::answer::Failure;
use super::super::export::Export;
use super::super::haggling::Terms;

/// What a request comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admitted {
    /// The backend is asked.
    Run {
        /// For what.
        operation: Operation,
        /// How.
        flags: Flags,
    },
    /// There is nothing to do: it is done.
    Nothing,
    /// Somebody has to find out what is where.
    Survey,
    /// Somebody has to make the export so long.
    Resize {
        /// Bytes.
        bytes: u64,
    },
    /// The client ends.
    End,
}

/// Whether `header` asks for something that there is, in a range that there is.
#[inline]
pub(super) fn admit(
    export: &Export,
    terms: Terms,
    header: &RequestHeader,
) -> Result<Admitted, Failure> {
    let RequestHeader { flags, command, len_bytes, .. } = *header;
    if command == Command::DISC {
        return Ok(Admitted::End);
    }
    let (operation, told) = rule(command, terms)?;
    check_flags(export, terms, command, flags)?;
    let writes = matches!(command, Command::WRITE | Command::TRIM | Command::WRITE_ZEROES);
    if writes && export.is_read_only() {
        return Err(Failure::new(ErrorCode::EPERM, "the export is read-only"));
    }
    if !export.flags(terms.structured).has(told) {
        return Err(Failure::new(ErrorCode::EINVAL, "the export cannot do this"));
    }
    if command == Command::RESIZE {
        return check_size(export, header);
    }
    if command != Command::FLUSH {
        check_range(export, header)?;
        if len_bytes == 0 {
            return Ok(Admitted::Nothing);
        }
    }
    let Some(operation) = operation else { return Ok(Admitted::Survey) };
    let forced = writes && flags.has(CommandFlags::FUA);
    let holes = command == Command::WRITE_ZEROES && !flags.has(CommandFlags::NO_HOLE);
    let flags = if forced { Flags::FUA } else { Flags::NONE };
    let flags = if holes { flags.and(Flags::DEALLOCATE) } else { flags };
    Ok(Admitted::Run { operation, flags })
}

/// What a command means to a backend, none if it is not for one, and the flag by which an export
/// tells that it has it.
fn rule(command: Command, terms: Terms) -> Result<(Option<Operation>, TransmissionFlags), Failure> {
    use TransmissionFlags as Told;
    Ok(match command {
        Command::READ => (Some(Operation::Read), Told::HAS_FLAGS),
        Command::WRITE => (Some(Operation::Write), Told::HAS_FLAGS),
        Command::FLUSH => (Some(Operation::Flush), Told::SEND_FLUSH),
        Command::TRIM => (Some(Operation::Deallocate), Told::SEND_TRIM),
        Command::CACHE => (Some(Operation::Verify), Told::SEND_CACHE),
        Command::WRITE_ZEROES => (Some(Operation::WriteZeroes), Told::SEND_WRITE_ZEROES),
        Command::RESIZE => (None, Told::SEND_RESIZE),
        Command::BLOCK_STATUS if terms.allocation => (None, Told::HAS_FLAGS),
        Command::BLOCK_STATUS => {
            let text = "no metadata context was chosen";
            return Err(Failure::new(ErrorCode::EINVAL, text));
        }
        _ => return Err(Failure::new(ErrorCode::EINVAL, "there is no such command")),
    })
}

/// "Command flags": each belongs to one command, but for FUA, which every command may carry where
/// it was told of.
fn check_flags(
    export: &Export,
    terms: Terms,
    command: Command,
    flags: CommandFlags,
) -> Result<(), Failure> {
    let told = export.flags(terms.structured);
    let mut known = match command {
        Command::READ if terms.structured => CommandFlags::DF,
        Command::WRITE_ZEROES => {
            let fast = told.has(TransmissionFlags::SEND_FAST_ZERO);
            CommandFlags::NO_HOLE.and_if(fast, CommandFlags::FAST_ZERO)
        }
        Command::BLOCK_STATUS => CommandFlags::REQ_ONE,
        _ => CommandFlags::NONE,
    };
    known = known.and_if(told.has(TransmissionFlags::SEND_FUA), CommandFlags::FUA);
    if flags.without(known) == CommandFlags::NONE {
        return Ok(());
    }
    Err(Failure::new(ErrorCode::EINVAL, "a flag does not belong to this command"))
}

/// The extension says no more than that there is such a request. Here the new size is where a request
/// says where it begins, and it has no length, so what others might mean by it is refused.
fn check_size(export: &Export, header: &RequestHeader) -> Result<Admitted, Failure> {
    let RequestHeader { offset, len_bytes, .. } = *header;
    if len_bytes != 0 {
        return Err(Failure::new(ErrorCode::EINVAL, "a new size has no length"));
    }
    if offset == 0 || !offset.is_multiple_of(u64::from(export.block_size())) {
        let text = "a new size is a multiple of the smallest block";
        return Err(Failure::new(ErrorCode::EINVAL, text));
    }
    Ok(Admitted::Resize { bytes: offset })
}

fn check_range(export: &Export, header: &RequestHeader) -> Result<(), Failure> {
    let RequestHeader { command, offset, len_bytes, .. } = *header;
    let moves = matches!(command, Command::READ | Command::WRITE);
    if moves && len_bytes > export.payload_bytes_max() {
        return Err(Failure::new(ErrorCode::EINVAL, "longer than the largest block"));
    }
    let end = offset.checked_add(u64::from(len_bytes));
    if end.is_none_or(|end| end > export.size_bytes()) {
        let grows = matches!(command, Command::WRITE | Command::WRITE_ZEROES);
        let error = if grows { ErrorCode::ENOSPC } else { ErrorCode::EINVAL };
        return Err(Failure::new(error, "past the end of the export"));
    }
    if command == Command::BLOCK_STATUS {
        return if len_bytes == 0 {
            Err(Failure::new(ErrorCode::EINVAL, "nothing is asked about"))
        } else {
            Ok(())
        };
    }
    let mask = u64::from(export.block_size()) - 1;
    if (offset | u64::from(len_bytes)) & mask != 0 {
        return Err(Failure::new(ErrorCode::EINVAL, "not a multiple of the smallest block"));
    }
    Ok(())
}
