"""Answers to exercise 14.2 that the check must reject or accept; CI proves both."""


def by_intensity(m, k, n, bytes_each, peak, bandwidth):
    per_byte = 2 * m * k * n / ((m * k + k * n + m * n) * bytes_each)
    if per_byte < peak / bandwidth:
        return per_byte * bandwidth, "memory"
    return peak, "compute"


def the_lower_roof(m, k, n, bytes_each, peak, bandwidth):
    elements = sum((m * k, k * n, m * n))
    roofs = {"compute": peak, "memory": bandwidth * 2 * m * k * n / elements / bytes_each}
    bound = min(roofs, key=roofs.get)
    return [roofs[bound], bound]


WRONG = {
    "14.2": """
roofs: You add the two times
    flops / max(compute, memory) => flops / (compute + memory)
roofs: That is the peak
    max(compute, memory) => min(compute, memory)
roofs: That is the peak
    flops / max(compute, memory) => peak
traffic: What happens to the result
    m * k + k * n + m * n => m * k + k * n
traffic: it is not read before
    m * k + k * n + m * n => m * k + k * n + 2 * m * n
traffic: of the weights only
    bytes_each * (m * k + k * n + m * n) => bytes_each * k * n
reuse: How large are the three matrices
    m * k + k * n + m * n => m * k + m * k * n + m * n
reuse: How large are the three matrices
    m * k + k * n + m * n => 2 * m * k * n
flops: are two FLOPs
    2 * m * k * n => m * k * n
units: there are no bits
    bytes_each * (m => 8 * bytes_each * (m
units: there are no bits
    bytes_each * (m => bytes_each / 8 * (m
units: but the bandwidth counts bytes
    bytes_each * (m => (m
units: Those are seconds
    flops / max(compute, memory) => max(compute, memory)
units: FLOPs per byte
    flops / max(compute, memory) => flops / nbytes
units: That is right in teraFLOP/s
    flops / max(compute, memory) => flops / max(compute, memory) / 1000000000000.0
units: a share of the peak
    flops / max(compute, memory) => compute / max(compute, memory)
units: Those are FLOPs: return
    flops / max(compute, memory) => flops
ridge: are not FLOP/s
    flops / max(compute, memory) => min(peak, nbytes / flops * bandwidth)
bound: moving bytes takes
    compute > memory => compute < memory
bound: moving bytes takes
    'compute' if compute > memory else 'memory' => 'memory'
bound: moving bytes takes
    compute > memory => m > peak / bandwidth * bytes_each / 2
bound: return "compute" or "memory"
    'compute' if compute > memory else 'memory' => compute > memory
speed: and you say
    flops / max(compute, memory) => 3 * flops / max(compute, memory)
returns: returned None
    print(end='')
returns: return (FLOP/s, bound)
    return min(peak, bandwidth)
returns: return (FLOP/s, bound)
    return ('memory', bandwidth)
""",
}
RIGHT = {"14.2": (by_intensity, the_lower_roof)}
COMPLETED = {
    "14.2": ["m * n", "max"],
}
