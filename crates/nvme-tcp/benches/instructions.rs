//! Benchmark: instructions per I/O at each end of an NVMe/TCP connection, for 4 KiB reads.
//!
//! Instructions are counted instead of measuring time, so other load on the machine does not affect
//! the result. Each count covers one iteration with the number of reads in its name. Host: all
//! reads are submitted and sent, and their responses are received from one buffer. Controller: all
//! reads are received from one buffer, completed, queued, sent and released. Sockets, data copies
//! and the device are excluded, and data digests are included only where the name says so.

#![expect(missing_docs, reason = "the macros generate items without documentation")]

use gungraun::{library_benchmark, library_benchmark_group, main};
use tenmil_base::Instant;
use tenmil_nvme_tcp::{
    Connection, ControllerConfig, ControllerConnection, ControllerEvent, DataDirection,
    DataTransfer, DigestMode, EventQueue, HostConfig, HostConnection, HostEvent, PayloadDigest,
    QueueKind, SendPiece, SuccessFlagPolicy,
};
use tenmil_wire::sgl::Descriptor;
use tenmil_wire::tcp::{C2HData, CapsuleCmd, CapsuleResp, IcReq, IcResp, PduFraming, crc32c};
use tenmil_wire::{Command, Completion, Status};

const BYTES: u32 = 4096;
const NOW: Instant = Instant { ns: 1 };

/// Preallocated payload of zeroes.
struct Zeros([u8; BYTES as usize]);

impl PayloadDigest for Zeros {
    fn data_digest(&self, _: u16, _: u32, len_bytes: u32) -> u32 {
        crc32c(&self.0[..len_bytes as usize])
    }
}

/// Completion method of the reads.
#[derive(Clone, Copy)]
struct ReadCompletionMode {
    digests: bool,
    success: bool,
}

const SUCCESS: ReadCompletionMode = ReadCompletionMode { digests: false, success: true };
const RESPONSE: ReadCompletionMode = ReadCompletionMode { digests: false, success: false };
const DIGESTS: ReadCompletionMode = ReadCompletionMode { digests: true, success: true };

impl ReadCompletionMode {
    fn framing(self) -> PduFraming {
        PduFraming { header_digest: self.digests, data_digest: self.digests, alignment: 0 }
    }

    fn append_header(self, header: &[u8], out: &mut Vec<u8>) {
        out.extend_from_slice(header);
        if self.digests {
            out.extend(crc32c(header).to_le_bytes());
        }
    }
}

/// Total length of a gather list.
fn len_of(pieces: &[SendPiece]) -> usize {
    let len = |piece: &SendPiece| match *piece {
        SendPiece::Headers { len_bytes, .. } | SendPiece::Payload { len_bytes, .. } => {
            len_bytes as usize
        }
    };
    pieces.iter().map(len).sum()
}

/// Host with the responses to all of its reads.
struct HostIteration {
    end: HostConnection,
    events: EventQueue<HostEvent>,
    payloads: Zeros,
    responses: Vec<u8>,
    count: u16,
}

impl HostIteration {
    fn new(mode: ReadCompletionMode, count: u16) -> Self {
        let digest_mode = if mode.digests { DigestMode::Required } else { DigestMode::Off };
        let config = HostConfig {
            depth: count,
            header_digest: digest_mode,
            data_digest: digest_mode,
            ..HostConfig::default()
        };
        let mut iteration = Self {
            end: HostConnection::new(config, NOW),
            events: EventQueue::with_capacity(1024),
            payloads: Zeros([0; BYTES as usize]),
            responses: Vec::new(),
            count,
        };
        let ic_pdu = IcResp::new(0, mode.digests, mode.digests, 1 << 17);
        iteration.send();
        iteration.end.receive(NOW, ic_pdu.as_bytes(), &mut iteration.events);
        iteration.events.clear();
        for tag in 0..count {
            let header = C2HData::new(mode.framing(), tag, 0, BYTES, (true, mode.success));
            mode.append_header(header.as_bytes(), &mut iteration.responses);
            iteration.responses.extend(&iteration.payloads.0);
            if mode.digests {
                iteration.responses.extend(crc32c(&iteration.payloads.0).to_le_bytes());
            }
            if !mode.success {
                let completion = Completion::new(tag, Status::SUCCESS);
                let response = CapsuleResp::new(mode.framing(), &completion);
                mode.append_header(response.as_bytes(), &mut iteration.responses);
            }
        }
        (0..4).for_each(|_| iteration.run());
        iteration
    }

    fn send(&mut self) {
        self.end.fill_send_queue(&self.payloads);
        let len = len_of(self.end.send_pieces());
        self.end.record_sent(len, &mut self.events);
    }

    #[inline(never)]
    fn run(&mut self) {
        for number in 0..self.count {
            let read = Command::new(2).with_nsid(1).with_cdw10(u32::from(number) * 8).with_cdw12(7);
            let submitted = self.end.submit(&read, DataDirection::ToHost(BYTES), &self.payloads);
            assert!(submitted.is_ok());
        }
        self.send();
        let (mut at, mut completed, mut data) = (0, 0, 0);
        while at < self.responses.len() {
            at += self.end.receive(NOW, &self.responses[at..], &mut self.events);
            for event in self.events.as_slice() {
                match event {
                    HostEvent::Data { placement, .. } => data += placement.len_bytes,
                    HostEvent::ReadCompleted { placement, .. } => {
                        data += placement.len_bytes;
                        completed += 1;
                    }
                    HostEvent::Completed { completion, .. } => {
                        completed += u16::from(completion.status().is_success());
                    }
                    HostEvent::Open(_) | HostEvent::Ended(_) => {}
                }
            }
            self.events.clear();
        }
        assert_eq!((completed, data), (self.count, u32::from(self.count) * BYTES));
    }
}

/// Controller with the commands for it.
struct ControllerIteration {
    end: ControllerConnection,
    events: EventQueue<ControllerEvent>,
    payloads: Zeros,
    reads: Vec<u8>,
    count: u16,
}

impl ControllerIteration {
    fn new(mode: ReadCompletionMode, count: u16) -> Self {
        let success =
            if mode.success { SuccessFlagPolicy::Always } else { SuccessFlagPolicy::Never };
        let config = ControllerConfig { depth: count, success, ..ControllerConfig::default() };
        let mut iteration = Self {
            end: ControllerConnection::new(config, NOW),
            events: EventQueue::with_capacity(1024),
            payloads: Zeros([0; BYTES as usize]),
            reads: Vec::new(),
            count,
        };
        let ic_pdu = IcReq::new(0, mode.digests, mode.digests, 0);
        iteration.end.receive(NOW, ic_pdu.as_bytes(), &mut iteration.events);
        iteration.end.set_queue_kind(QueueKind::Io { entries: 129, flow_control: true });
        iteration.events.clear();
        iteration.send();
        for cid in 0..count {
            let read = Command::new(2).with_cid(cid).with_nsid(1).with_cdw12(7);
            let read = read.with_sgl1(Descriptor::transport_data_block(BYTES));
            mode.append_header(
                CapsuleCmd::new(mode.framing(), &read, 0).as_bytes(),
                &mut iteration.reads,
            );
        }
        (0..4).for_each(|_| iteration.run());
        iteration
    }

    /// Returns the number of released commands.
    fn send(&mut self) -> usize {
        let mut released = 0;
        loop {
            self.end.fill_send_queue(&self.payloads);
            let len = len_of(self.end.send_pieces());
            if len == 0 {
                return released;
            }
            self.end.record_sent(len, &mut self.events);
            released += self.events.as_slice().len();
            self.events.clear();
        }
    }

    #[inline(never)]
    fn run(&mut self) {
        let mut at = 0;
        while at < self.reads.len() {
            at += self.end.receive(NOW, &self.reads[at..], &mut self.events);
            for event in self.events.as_slice() {
                if let ControllerEvent::Command {
                    tag, data: Ok(DataTransfer::ToHost(len)), ..
                } = *event
                {
                    self.end
                        .complete(tag, len, Completion::new(0, Status::SUCCESS))
                        .expect("the command is outstanding");
                }
            }
            self.events.clear();
        }
        assert_eq!(self.send(), usize::from(self.count));
    }
}

#[library_benchmark]
#[bench::success_1(args = (SUCCESS, 1), setup = HostIteration::new)]
#[bench::success_128(args = (SUCCESS, 128), setup = HostIteration::new)]
#[bench::response_128(args = (RESPONSE, 128), setup = HostIteration::new)]
#[bench::digests_128(args = (DIGESTS, 128), setup = HostIteration::new)]
fn tcp_host(mut iteration: HostIteration) -> HostIteration {
    iteration.run();
    iteration
}

#[library_benchmark]
#[bench::success_1(args = (SUCCESS, 1), setup = ControllerIteration::new)]
#[bench::success_128(args = (SUCCESS, 128), setup = ControllerIteration::new)]
#[bench::response_128(args = (RESPONSE, 128), setup = ControllerIteration::new)]
#[bench::digests_128(args = (DIGESTS, 128), setup = ControllerIteration::new)]
fn tcp_controller(mut iteration: ControllerIteration) -> ControllerIteration {
    iteration.run();
    iteration
}

library_benchmark_group!(name = exchange; benchmarks = tcp_host, tcp_controller);
main!(library_benchmark_groups = exchange);
