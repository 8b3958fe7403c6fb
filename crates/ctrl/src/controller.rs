//! The admin half of a controller: one thread, no transport, no I/O queues, time as an argument.
//!
//! What passes between it and the transport in front of it is drawn in [`contract`]. The methods a
//! front end calls, with their types, in the order of a controller's life:
//!
//! ```text
//!   Subsystem::new(SubsystemConfig) -> Subsystem                       cheap to clone
//!   Subsystem::controller(&self, now, ControllerConfig) -> Controller  one host's view
//!
//!   data(&self, &Command) -> Result<AdminData, Status>
//!   execute(&mut self, now, &Command, data: &mut Vec<u8>) -> AdminStep
//!   reservation_data(&self, &Command) -> Result<AdminData, Status>     I/O opcodes 0Dh, 0Eh, 11h, 15h
//!   reservation(&mut self, now, &Command, data: &mut Vec<u8>) -> AdminEnd
//!   turn(&mut self, now)
//!   next_done(&mut self) -> Option<AdminDone>
//!   next_event(&mut self) -> Option<u32>          dword 0 for the oldest parked event request
//!   next_signal(&mut self) -> Option<Signal>
//!   wake_at(&self) -> Instant
//!
//!   report_error(&mut self, now, &ErrorReport)
//!   invalid_doorbell(&mut self, now, InvalidDoorbell)
//!   add_traffic(&mut self, &Traffic)
//!   io_command_seen(&mut self, now)               keep-alive with traffic, once per turn
//!   queue_created(&mut self)                      an I/O queue exists: feature 07h is now fixed
//!   abort_ended(&mut self)                        the front end has answered an Abort
//!   event_request_aborted(&mut self)              ... and it was a parked event request
//!   reset(&mut self, now)                         CC.EN went to 0, or the association ended
//!   shutdown(&mut self, now, abrupt: bool)        CC.SHN
//!
//!   configuration(&self) -> &ControllerConfig     MQES, MDTS, vectors, CNTLID, …
//!   queues_granted(&self) -> (u16, u16)           submission, completion queues
//!   write_cache_enabled(&self) -> bool
//!   coalescing(&self) -> Coalescing
//!   is_coalescing_disabled(&self, vector: u16) -> bool
//!   arbitration(&self) -> Arbitration
//!   namespaces(&self) -> &Arc<Namespaces>         what this controller's queues may touch now;
//!                                                 replaced as a whole: compare with Arc::ptr_eq
//! ```

pub mod contract;
pub mod reservation;
