//! Corruption of data structures on their way to the host.

use tenmil_base::Instant;

use super::planned_fault::CorruptionMethod;
use super::{Fault, FaultInjector, InjectionPoint, QueueKind};
use crate::buffer_ownership::OwnedCommand;

impl FaultInjector {
    /// Corrupts `bytes`, which are at `offset` in the data of an admin command. Returns whether it
    /// did.
    pub fn corrupt_admin_data(
        &mut self,
        now: Instant,
        command: &OwnedCommand,
        offset: u64,
        bytes: &mut [u8],
    ) -> bool {
        let [page, ..] = command.cdw10.to_le_bytes();
        let is_wanted = |fault: &Fault| match fault {
            Fault::CorruptData(forgery) => forgery.page.is_none_or(|wanted| wanted == page),
            _ => false,
        };
        let site = InjectionPoint { queue: QueueKind::Admin, opcode: Some(command.opcode) };
        let Some(Fault::CorruptData(forgery)) = self.take_due_fault(now, site, is_wanted) else {
            return false;
        };
        match forgery.how {
            CorruptionMethod::Fill(byte) => bytes.fill(byte),
            CorruptionMethod::Random => {
                bytes.iter_mut().for_each(|byte| *byte = self.random_byte())
            }
            CorruptionMethod::Poke { offset: at, mask, bits } => {
                let (mask, bits) = (mask.to_le_bytes(), bits.to_le_bytes());
                for ((at, mask), bits) in (u64::from(at)..).zip(mask).zip(bits) {
                    let index = at.checked_sub(offset).and_then(|at| usize::try_from(at).ok());
                    if let Some(byte) = index.and_then(|index| bytes.get_mut(index)) {
                        *byte = *byte & !mask | bits & mask;
                    }
                }
            }
            CorruptionMethod::Count(first) => {
                let skipped = u32::try_from(offset / 4).unwrap_or(0);
                for (chunk, index) in bytes.chunks_exact_mut(4).zip(skipped..) {
                    chunk.copy_from_slice(&first.wrapping_add(index).to_le_bytes());
                }
            }
        }
        true
    }

    fn random_byte(&mut self) -> u8 {
        self.random.next_u64().to_le_bytes()[7]
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Instant, Random};
    use tenmil_wire::AdminOpcode;

    use super::super::{Fault, FaultInjector, PlannedFault, pokes};
    use crate::buffer_ownership::OwnedCommand;

    fn corrupted_data(fault: Fault, opcode: AdminOpcode, page: u32, offset: u64) -> Vec<u8> {
        let mut evil = FaultInjector::new(
            &[PlannedFault::for_admin_opcode(AdminOpcode::Identify, fault)],
            Random::new(1),
        );
        let now = Instant::default();
        let opcode = opcode.code();
        let command = OwnedCommand { token: None, opcode, cdw10: page, data: 0, stored_at: now };
        let mut bytes = vec![0x11; 16];
        evil.corrupt_admin_data(now, &command, offset, &mut bytes);
        bytes
    }

    #[test]
    fn field_is_replaced_wherever_the_data_is_split() {
        let fault = pokes::identify_controller_fault(4, 2, 0xbbaa);
        let identify = AdminOpcode::Identify;
        assert_eq!(corrupted_data(fault, identify, 1, 0)[3..7], [0x11, 0xaa, 0xbb, 0x11]);
        assert_eq!(corrupted_data(fault, identify, 1, 5)[..2], [0xbb, 0x11]);
        assert_eq!(corrupted_data(fault, identify, 1, 8), [0x11; 16], "not in this part");
        assert_eq!(corrupted_data(fault, identify, 0, 0), [0x11; 16], "another page");
        assert_eq!(
            corrupted_data(fault, AdminOpcode::GetLogPage, 1, 0),
            [0x11; 16],
            "another command"
        );
    }

    #[test]
    fn identifier_lists_count_up_endlessly() {
        let bytes = corrupted_data(pokes::page_counting_fault(2, 7), AdminOpcode::Identify, 2, 4);
        assert_eq!(bytes[..8], [8, 0, 0, 0, 9, 0, 0, 0]);
    }
}
