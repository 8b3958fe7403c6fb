//! Which data a command has: what its opcode, its SGL and its capsule say together (§3.3.2).

use wire::opcode::Transfer;
use wire::sgl::Descriptor;
use wire::{AdminOpcode, Command, DataPointer, Status};

use super::CommandData;

/// Whether `command`, with `capsule_bytes` of data in its capsule, is one of fabrics.
#[inline]
pub(super) fn is_fabrics(command: &Command) -> bool {
    command.opcode() == AdminOpcode::FabricsCommands.code()
}

/// Which way the data of a command go: the lowest bits of its opcode, or of FCTYPE.
#[inline]
fn transfer(command: &Command) -> Transfer {
    let code = if is_fabrics(command) { command.nsid().to_le_bytes()[0] } else { command.opcode() };
    Transfer::of(code)
}

/// Which data a command has, or how it ends because that is not to be had.
#[inline]
pub(super) fn classify(
    command: &Command,
    capsule_bytes: u32,
    transfer_bytes_max: u32,
) -> Result<CommandData, Status> {
    let way = transfer(command);
    if way == Transfer::None {
        // Nothing looks at the SGL of a command without data.
        return if capsule_bytes == 0 {
            Ok(CommandData::None)
        } else {
            Err(Status::DATA_SGL_LENGTH_INVALID)
        };
    }
    let sgl = command.sgl1();
    let len_bytes = sgl.len_bytes();
    if len_bytes == 0 && capsule_bytes == 0 {
        // Nothing moves: a host may have left where it would.
        return Ok(CommandData::None);
    }
    if command.psdt() != DataPointer::Sgl && !is_fabrics(command) {
        return Err(Status::INVALID_FIELD);
    }
    let data = match (sgl.kind(), sgl.subtype(), way) {
        (Descriptor::DATA_BLOCK, Descriptor::OFFSET, Transfer::HostToController) => {
            if sgl.address() != 0 {
                return Err(Status::SGL_OFFSET_INVALID);
            }
            if len_bytes != capsule_bytes {
                return Err(Status::DATA_SGL_LENGTH_INVALID);
            }
            CommandData::InCapsule(len_bytes)
        }
        (Descriptor::TRANSPORT_DATA_BLOCK, Descriptor::TRANSPORT, way) => {
            if capsule_bytes != 0 || len_bytes > transfer_bytes_max {
                return Err(Status::DATA_SGL_LENGTH_INVALID);
            }
            if len_bytes & 3 != 0 {
                return Err(Status::SGL_DATA_BLOCK_GRANULARITY_INVALID);
            }
            match way {
                Transfer::HostToController => CommandData::FromHost(len_bytes),
                Transfer::ControllerToHost => CommandData::ToHost(len_bytes),
                Transfer::None | Transfer::Bidirectional => return Err(Status::INVALID_FIELD),
            }
        }
        _ => return Err(Status::SGL_DESCRIPTOR_TYPE_INVALID),
    };
    Ok(data)
}
